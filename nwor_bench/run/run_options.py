"""Options that do not change the measurement: where a run goes and what is shown."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nwor_bench.errors import ConfigError
from nwor_bench.workload.options import Option, Panel

if TYPE_CHECKING:
    from nwor_bench.run.heartbeat import Heartbeat


def _new_folder(flag: str, text: str) -> Path:
    if text == "":
        raise ConfigError.for_field(flag, text, "name a new folder")
    return Path(text)


@dataclass(frozen=True)
class RunOptions:
    """Where a run or a sweep goes, and what is printed."""

    # fmt: off
    output: Annotated[Path | None, Option(
        "Run folder (default: runs/TIME-SCENARIO-PAIR).", Panel.FILES, written=str,
        read=_new_folder,
    )] = None
    resume: Annotated[Path | None, Option(
        "Continue the run (or sweep) in this folder.", Panel.FILES, written=str,
    )] = None
    file: Annotated[Path | None, Option(
        "A sweep file (sweeps/*.toml): many runs, as few engines as possible.", Panel.FILES,
        written=str,
    )] = None
    """A sweep file, or the name of a shipped one."""
    continue_on_error: Annotated[bool, Option(
        "With --file: continue with the next run if one fails.", Panel.FILES,
    )] = False
    ray: Annotated[bool, Option(
        "With --file: on a Ray cluster (RAY_ADDRESS, else this machine), one engine per GPU.",
        Panel.FILES,
    )] = False
    dry_run: Annotated[bool, Option("Show what would run, and stop.")] = False
    quiet: Annotated[bool, Option(
        "Print only the answer and the folder.", aliases=("-q",),
    )] = False
    as_json: Annotated[bool, Option(
        "Print only the result, as JSON (docs/json.md).", name="json",
    )] = False
    verbose: Annotated[bool, Option(
        "Show all details, and vLLM's log.", aliases=("-v",),
    )] = False
    """Print every finding and leave vLLM's log on the terminal, not in a file of the folder."""
    # fmt: on
    heartbeat: "Heartbeat | None" = None
    """Shows that a long step goes on; None for none."""


DEFAULT_OPTIONS = RunOptions()
"""Options of a run of which nothing is asked but to be run."""
