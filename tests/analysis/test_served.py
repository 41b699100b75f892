"""The line found over other arms on an open loop."""

from typing import Any

import pytest

from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.analysis.served import best_fixed, served_ratios

Ratios = dict[tuple[int, int], float | None]
"""tokens/s over k = 0 by batch size and count."""


def row(block: int, arm: str, tpot: float, seconds: float) -> dict[str, Any]:
    return {"block": block, "arm": arm, "requests": 4, "tokens": 120, "seconds": seconds,
            "tpot_ms": tpot}  # fmt: skip


def test_arms_are_compared_by_block() -> None:
    """Blocks differ fivefold; the line takes 0.8 to 0.9 of k = 0's time per token in each."""
    rows = []
    for block, (scale, share) in enumerate([(1.0, 0.8), (5.0, 0.9), (2.0, 0.85)]):
        rows += [row(block, "line", 10 * scale * share, 3.0), row(block, "k = 0", 10 * scale, 6.0)]
    (found,) = served_ratios(rows)
    assert (found.over, found.blocks, found.requests) == ("k = 0", 3, 4)
    assert found.tpot is not None
    assert found.tpot.ratio == pytest.approx((0.8 * 0.9 * 0.85) ** (1 / 3))
    assert 0.7 < found.tpot.low < 0.8 < found.tpot.high < 1
    assert found.tokens_per_s is not None
    assert found.tokens_per_s.ratio == pytest.approx(2)


def test_a_block_that_was_cut_and_too_few_blocks() -> None:
    rows = [row(0, "line", 8, 3), row(0, "k = 0", 10, 6), row(1, "line", 8, 3)]
    (found,) = served_ratios(rows)
    assert (found.blocks, found.tpot) == (1, None)
    assert served_ratios([]) == []


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
