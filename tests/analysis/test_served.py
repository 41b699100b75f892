"""The one draft count of all batch sizes."""

import pytest

from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.analysis.served import best_fixed

Ratios = dict[tuple[int, int], float | None]
"""tokens/s over k = 0 by batch size and count."""


@pytest.mark.parametrize(
    ("ratios", "best"),
    [
        ({(1, 1): 1.2, (1, 2): 1.6, (8, 1): 1.1, (8, 2): 0.9}, 2),  # 1.32 and 1.44 squared
        ({(1, 1): 1.2, (1, 2): 1.3, (8, 1): 1.1, (8, 2): 0.9}, 1),
        ({(1, 1): 0.9, (8, 1): 0.8}, 0),
        ({(1, 1): 1.2, (1, 2): 1.1, (8, 1): 0.2, (8, 2): None}, 1),  # 8 is left out
        ({(1, 1): None, (1, 2): 1.1}, None),
    ],
)
def test_the_best_fixed_count(ratios: Ratios, best: int | None) -> None:
    rates = [Rate(size, k, r, r, r, "", 1.0, 1.0, 9) for (size, k), r in ratios.items()]
    assert best_fixed(Worth(tuple(rates), {}, 1, {})) == best
