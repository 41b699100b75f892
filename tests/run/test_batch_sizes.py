"""Batch sizes that share a time budget: which are measured, and what is said of the others."""

import pytest

from nwor_bench.run.batch_sizes import BatchSizes

EVERY = (8, 4, 2, 1)


def measured(sizes: BatchSizes) -> list[int]:
    return [size for size in EVERY if sizes.has_room(size)]


@pytest.mark.parametrize(
    ("seconds", "kept", "said"),
    [
        (400, [8, 4, 2, 1], None),
        (340, [8, 1], "without 2 and 4 requests (enough: --time-budget 6m)"),
        (200, [8, 1], "without 2 and 4 requests (enough: --time-budget 6m)"),
        (140, [8], "without 1, 2 and 4 requests (enough: --time-budget 6m)"),
        (59, [1], "without 2, 4 and 8 requests (enough: --time-budget 6m)"),  # 8's gate takes 40
    ],
)
def test_a_short_time_has_fewer_sizes_that_are_measured_well(
    seconds: float, kept: list[int], said: str | None
) -> None:
    sizes = BatchSizes(seconds, EVERY)
    text = sizes.forecast(8, gate_s=40.0, timed_s=80.0) or ""
    assert measured(sizes) == kept
    assert text.partition(": without")[2] == (said or "").removeprefix("without")
    assert text.startswith("time: the gate of 8 requests" if kept == [1] else "time: 1, 2, 4 and 8")


def test_what_is_measured_shares_all_of_the_time() -> None:
    sizes = BatchSizes(200.0, EVERY)
    sizes.forecast(8, 40.0, 80.0)
    first = sizes.share_s(8)
    assert first > 120.0
    assert first + sizes.share_s(1) == pytest.approx(200.0)
    sizes.finish(8, spent_s=80.0)  # earlier than it had to
    assert measured(sizes) == [1]
    assert sizes.share_s(1) == 120.0


def test_the_last_size_is_measured_as_far_as_the_time_goes() -> None:
    """The gate is not paid from a time that is shorter without a word."""
    sizes = BatchSizes(60.0, [8])
    assert sizes.forecast(8, 30.0, 300.0) is None
    said = sizes.forecast(8, 50.0, 40.0)
    assert said == (
        "time: the gate of 8 requests will take about 0:50, and 1:00 is left (enough: "
        "--time-budget 2m)"
    )
    assert sizes.has_room(8)
    assert sizes.share_s(8) == 60.0
