"""Fractions and durations as people write them. Every command reads them here. Pure."""

import re

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def fraction(text: str) -> float | None:
    """`16%`, `16 %` and `0.16` are 0.16; None for what is no number. `16` is 16."""
    found = _number_and_unit(text)
    if found is None or found[1] not in ("", "%"):
        return None
    return found[0] / 100 if found[1] else found[0]


def seconds(text: str) -> float | None:
    """`60`, `60s`, `1m` and `1min` are 60; None for what is no duration."""
    found = _number_and_unit(text)
    if found is None or found[1] not in _UNITS:
        return None
    return found[0] * _UNITS[found[1]]


def _number_and_unit(text: str) -> tuple[float, str] | None:
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(%|[a-z]*)\s*", text)
    return None if found is None else (float(found.group(1)), found.group(2))
