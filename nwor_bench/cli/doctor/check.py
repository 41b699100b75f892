"""One thing that was looked at, and what came of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """ok: usable. missing: not there. wrong: there, but not as it must be."""

    OK = "ok"
    MISSING = "missing"
    WRONG = "wrong"


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        name: what was looked at.
        state: how it stands.
        found: what is there, or what is not.
        remedy: what to do about it; empty where nothing needs doing.
        needed: without it no sweep can run.
    """

    name: str
    state: State
    found: str
    remedy: str = ""
    needed: bool = False

    def __post_init__(self) -> None:
        if self.state is not State.OK and not self.remedy:
            raise ValueError(f"{self.name} is {self.state} and says no remedy")


def what_and_remedy(message: str) -> tuple[str, str]:
    """Our messages say what is wrong and, behind a semicolon, what to do; '' if they do not."""
    what, _, remedy = message.partition("; ")
    return what, remedy


def can_sweep(checks: Iterable[Check]) -> bool:
    """Is everything there that a sweep needs?"""
    return all(check.state is State.OK for check in checks if check.needed)
