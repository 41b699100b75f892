"""What decides a comparison; apart, since a wrong word is refused before scipy is imported."""

from enum import StrEnum


class DecideBy(StrEnum):
    """The number that decides a change's verdict: the ratio to off x off, or the time."""

    RATIO = "ratio"
    TIME = "time"
