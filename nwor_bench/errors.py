"""Errors that a user can act on. Each message says what to change; the CLI prints it and exits."""

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every nwor-bench command (see the README)."""

    OK = 0
    FAILED = 1
    BAD_USAGE = 2
    CORRECTNESS_BROKEN = 3
    REGRESSION = 4
    INCONCLUSIVE = 5
    INTERRUPTED = 130


class BenchError(Exception):
    """Base of all errors that nwor-bench raises on purpose."""

    exit_code = ExitCode.FAILED


class ConfigError(BenchError):
    """Unknown or bad input, refused before anything expensive starts."""

    exit_code = ExitCode.BAD_USAGE

    @classmethod
    def for_field(cls, field: str, value: object, remedy: str) -> "ConfigError":
        """Name the field, the value given, and what to write instead."""
        return cls(f"{field}: {value!r} is not usable; {remedy}")

    @classmethod
    def unknown(cls, field: str, value: str, known: Iterable[str]) -> "ConfigError":
        """Refuse an unknown name and offer the nearest known one."""
        names = sorted(known)
        near = get_close_matches(value, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cls(f"{field}: unknown name {value!r}; {hint}known: {', '.join(names)}")


class UnsupportedVllmError(ConfigError):
    """The installed vLLM is not one whose insides the plugin knows."""


class EngineError(BenchError):
    """The engine did not start, or failed while it ran."""


class NotComparableError(BenchError):
    """Two runs that did not do the same work on the same machine."""

    exit_code = ExitCode.INCONCLUSIVE


class StoreError(BenchError):
    """A run folder cannot be read or written."""

    exit_code = ExitCode.BAD_USAGE
