"""Errors that a user can act on. Each message says what to change; the CLI prints it and exits."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Exit codes of every nwor-bench command (see the README)."""

    OK = 0
    FAILED = 1
    BAD_USAGE = 2
    CORRECTNESS_BROKEN = 3
    REGRESSION = 4
    INCONCLUSIVE = 5
    INTERRUPTED = 130


def worst_of(codes: Iterable[ExitCode]) -> ExitCode:
    """Exit code of several runs or comparisons: wrong numbers are worse than none."""
    order = (ExitCode.OK, ExitCode.INCONCLUSIVE, ExitCode.REGRESSION, ExitCode.BAD_USAGE,
             ExitCode.FAILED, ExitCode.CORRECTNESS_BROKEN, ExitCode.INTERRUPTED)  # fmt: skip
    return max(codes, key=order.index, default=ExitCode.OK)


MAX_OFFERED = 3
"""Names that a refusal offers for one that is not known."""

MAX_LISTED = 30
"""Names that it lists if none is like the unknown one; more, such as vLLM's arguments, would fill a
screen."""


class BenchError(Exception):
    """Base of all errors that nwor-bench raises on purpose.

    Made by `at` or a constructor that calls it, so that message and attributes cannot differ.
    """

    exit_code = ExitCode.FAILED

    field: str = ""
    """What is wrong, as the message begins: a flag, key or file, after the file's line or the run
    that holds it ("my.toml:3: axes.requests"). "" if the message names none."""

    value: object = None
    """What was found there. None if it is not known, or nothing."""

    near: str = ""
    """The known name nearest to an unknown one. "" without one."""

    @classmethod
    def at(
        cls, field: object, problem: str, value: object = None, *, joint: str = ": ", near: str = ""
    ) -> Self:
        """Name the field, then what is wrong with it; `joint` stands between the two."""
        return cls(f"{field}{joint}{problem}")._about(str(field), value, near)

    def within(self, place: object) -> Self:
        """The error with message and field after a place: a line, one of many runs."""
        field = f"{place}: {self.field}" if self.field else str(place)
        return type(self)(f"{place}: {self}")._about(field, self.value, self.near)

    def of_run(self, number: int, label: str) -> Self:
        """The error within one of many runs; the first one's as it is: mostly all share it."""
        return self if number == 1 else self.within(f"run {number} ({label})")

    def _about(self, field: str, value: object, near: str) -> Self:
        self.field, self.value, self.near = field, value, near
        return self


class ConfigError(BenchError):
    """Unknown or bad input, refused before anything expensive starts."""

    exit_code = ExitCode.BAD_USAGE

    @classmethod
    def for_field(cls, field: str, value: object, remedy: str) -> Self:
        """Name the field, the value given, and what to write instead."""
        return cls.at(field, f"{value!r} is invalid; {remedy}", value)

    @classmethod
    def unknown(cls, field: str, value: str, known: Iterable[str], shown_by: str = "") -> Self:
        """Refuse an unknown name and offer those like it; `shown_by` is the command that lists all
        known ones."""
        offer, near = nearest(value, sorted(map(str, known)), shown_by)
        return cls.at(field, f"unknown name {value!r}; {offer}", value, near=near)

    @classmethod
    def all_of(cls, errors: Sequence["ConfigError"]) -> "ConfigError":
        """Several errors as one with a line for each. Field and value are the first's."""
        first = errors[0]
        return cls("\n".join(map(str, errors)))._about(first.field, first.value, first.near)


def nearest(name: str, known: Sequence[str], shown_by: str = "") -> tuple[str, str]:
    """Words that offer at most three known names like `name`, or say where all are; and the nearest
    of them, "" without one."""
    written = name.lower()
    like = get_close_matches(written, known, n=MAX_OFFERED)
    like += [each for each in known if written and each.startswith(written) and each not in like]
    if like:
        *others, last = map(repr, like[:MAX_OFFERED])
        return f"did you mean {' or '.join(filter(None, (', '.join(others), last)))}?", like[0]
    if shown_by:
        return f"`{shown_by}` shows all {len(known)}", ""
    listed = len(known) <= MAX_LISTED
    return f"known: {', '.join(known)}" if listed else f"there are {len(known)} names", ""


class UnsupportedVllmError(ConfigError):
    """The installed vLLM is not one whose insides the plugin knows."""


class EngineError(BenchError):
    """The engine did not start, or failed while it ran."""


class DeviceDiedError(EngineError):
    """The GPU takes no more calls, so this process can only end."""


class NotComparableError(BenchError):
    """Two runs that did not do the same work on the same machine."""

    exit_code = ExitCode.INCONCLUSIVE


class StoreError(BenchError):
    """A run folder cannot be read or written."""

    exit_code = ExitCode.BAD_USAGE
