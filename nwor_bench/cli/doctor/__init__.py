"""`nwor-bench doctor`: the result of one check, and all checks as text of at most 80 columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from textwrap import wrap as wrap_text

WIDTH = 80
INDENT = 19

wrap = partial(wrap_text, width=WIDTH, break_on_hyphens=False)
"""Wrapped lines. Hyphens do not break, so that paths, options and packages can be copied."""


class State(StrEnum):
    """ok: usable. missing: not installed or not present. wrong: present, but not usable."""

    OK = "ok"
    MISSING = "missing"
    WRONG = "wrong"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        state: its state.
        found: what was found, or what is missing.
        remedy: what to do; empty if nothing is to be done.
        needed: True if a sweep cannot run without it.
    """

    name: str
    state: State
    found: str
    remedy: str = ""
    needed: bool = False

    def __post_init__(self) -> None:
        if self.state is not State.OK and not self.remedy:
            raise ValueError(f"{self.name} is {self.state} and has no remedy")


def what_and_remedy(message: str) -> tuple[str, str]:
    """An error message split at its semicolon: what is wrong, and what to do ('' if not given)."""
    what, _, remedy = message.partition("; ")
    return what, remedy


def can_sweep(checks: Iterable[Check]) -> bool:
    """True if every check that a sweep needs is ok."""
    return all(check.state is State.OK for check in checks if check.needed)


def check_lines(checks: Sequence[Check]) -> list[str]:
    """One line per check, `name  state  what was found`, followed by its remedy."""
    lines = []
    for check in checks:
        head = f"{check.name:9} {check.state:8} "
        lines += wrap(check.found, initial_indent=head, subsequent_indent=" " * INDENT) or [head]
        if check.remedy:
            arrow = " " * INDENT + "-> "
            lines += wrap(check.remedy, initial_indent=arrow, subsequent_indent=" " * len(arrow))
    return [*lines, "", *wrap(verdict(checks))]


def verdict(checks: Sequence[Check]) -> str:
    """One sentence: whether a sweep can run, and which checks failed."""
    failed = [check.name for check in checks if check.state is not State.OK]
    if not can_sweep(checks):
        stops = [check.name for check in checks if check.needed and check.name in failed]
        return f"A sweep cannot run here until these are fixed: {', '.join(stops)}."
    if not failed:
        return "A sweep can run here, and everything that nwor-bench measures can be measured."
    return f"A sweep can run here. Missing or wrong, but not needed for it: {', '.join(failed)}."
