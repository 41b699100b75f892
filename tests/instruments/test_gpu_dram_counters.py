"""The GPU's own counters against copies whose bytes are known; needs the permission for them."""

import time

import pytest

from nwor_bench.instruments.pm_sampling import (
    CountersUnavailable,
    PmSampler,
    check_counters,
    counted_between,
    match_clocks,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _counters_are_allowed() -> None:
    try:
        check_counters(lambda: True)
    except CountersUnavailable as reason:
        pytest.skip(str(reason))


def test_a_copy_reads_and_writes_its_own_bytes() -> None:
    from nwor_bench.plugin.observe.window_counters import COPY_BYTES, CudaTimeline

    timeline, sampler = CudaTimeline(), PmSampler(interval_ns=20_000)
    for _ in range(2):  # a second time: the first sample after a restart must not count
        sampler.start()
        began = time.perf_counter()
        anchor = timeline.anchor()
        marks = []
        for _ in range(4):
            time.sleep(0.01)
            start = timeline.mark()
            timeline.copy()
            marks.append((start, timeline.mark()))
            timeline.ns(marks[-1][1])
        time.sleep(0.01)
        samples = sampler.stop(time.perf_counter() - began)
        copies = [(timeline.ns(start), timeline.ns(end)) for start, end in marks]
        match = match_clocks(samples, copies, COPY_BYTES, anchor)
        assert match is not None
        assert match.copies == 4
        assert match.copy_ratio == pytest.approx(1.0, abs=0.01)
        assert match.spread_ns < 60_000
        around = [(start - 3e6, end + 3e6) for start, end in copies]
        found = counted_between(samples, match.offset_ns, *zip(*around, strict=True))
        assert found[:, 0] == pytest.approx(COPY_BYTES, rel=0.02)
        assert found[:, 1] == pytest.approx(COPY_BYTES, rel=0.3)  # L2 writes back when it likes
    sampler.close()
