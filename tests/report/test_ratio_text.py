"""How a ratio reads: three digits, four where the interval needs them."""

import pytest

from nwor_bench.report.text import with_bounds


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.9691, 0.9603, 0.9772, "0.969 [0.960, 0.977]"),
        (0.96914, 0.96846, 0.96982, "0.9691 [0.9685, 0.9698]"),
        (1.00004, 0.99991, 1.00017, "1.0000 [0.9999, 1.0002]"),
        (1.0123, None, None, "1.012"),
    ],
)
def test_a_narrow_interval_has_a_fourth_digit(value, low, high, text):
    assert with_bounds(value, low, high) == text
