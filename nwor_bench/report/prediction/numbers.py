"""How a prediction writes its numbers."""

from math import floor, log10

from nwor_bench.report.text import size

_NOTHING = 1e-9
"""A percentage below this is a rounding error."""


def percent(share: float) -> str:
    """A fraction as a percentage with two significant digits: 0.025 %, 12 %."""
    value = 100 * share
    if abs(value) < _NOTHING:
        return "0 %"
    decimals = max(0, 1 - floor(log10(abs(value))))
    return f"{value:.{decimals}f} %"


def signed_size(amount: float) -> str:
    """Bytes with a minus sign if negative: -1.8 MB."""
    text = size(round(abs(amount)))
    return f"-{text}" if round(amount) < 0 else text
