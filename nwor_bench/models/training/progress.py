"""Progress of a training: a bar on a terminal, and one line per epoch."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class TrainingProgress:
    """A progress bar for the current work: prompts, answers or steps."""

    def __init__(self, console: Console):
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Start a new bar of `total` steps."""
        self._bar.reset(self._task, total=total, completed=done, description=what)

    def advance(self, steps: int = 1, what: str | None = None) -> None:
        """Advance the bar, and set its text if `what` is given."""
        self._bar.update(self._task, advance=steps, description=what)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def epoch(self, row: dict[str, Any], epochs: int) -> None:
        """Print one line for a finished epoch; epoch 0 is the untrained head."""
        loss = "" if row["loss"] is None else f"loss {row['loss']:.3f}, "
        self.say(
            f"epoch {row['epoch']} of {epochs}: {loss}held-out acceptance length "
            + ", ".join(_acceptance(found) for found in row["held_out"])
        )


def _acceptance(found: dict[str, Any]) -> str:
    over = f"over the first {found['answer_tokens']} tokens of an answer"
    if found["acceptance_length"] is None:
        return f"unknown {over}"
    rates = " ".join(f"{rate:.2f}" for rate in found["rates"])
    return f"{found['acceptance_length']:.2f} {over} (by position {rates})"
