"""CUDA calls by window: against a count made the slow way, and from PyTorch's own profiler."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.instruments.launches import (
    KINDS,
    STEP,
    HostCall,
    count_calls,
    kind_of,
    open_profiler,
    read_calls,
)

NAMES = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch_v10000", "cudaGetDevice",
         "cudaStreamSynchronize_v3020", "cuMemcpyDtoHAsync_v2", "cuLaunchKernel_ptsz"]  # fmt: skip


@examples(60)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-50, 1050)), max_size=60),
    borders=st.lists(st.integers(0, 1000), min_size=2, max_size=9, unique=True),
    keep=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_each_call_counts_once_in_its_window(
    calls: list[tuple[str, int]], borders: list[int], keep: list[bool]
) -> None:
    spans = list(zip(sorted(borders), sorted(borders)[1:], strict=False))
    spans = [span for span, wanted in zip(spans, keep, strict=False) if wanted]
    found = count_calls(
        [HostCall(*call) for call in calls], [s for s, _ in spans], [e for _, e in spans]
    )
    for (start, end), counts in zip(spans, found, strict=True):
        inside = [kind_of(name) for name, at in calls if start <= at < end]
        assert counts == {kind: inside.count(kind) for kind in KINDS}


def test_versions_and_streams_are_the_same_call() -> None:
    same = {"cudaLaunchKernel", "cudaLaunchKernel_v7000", "cudaLaunchKernel_ptsz",
            "cudaLaunchKernelExC_v11060_ptsz", "cuLaunchKernelEx"}  # fmt: skip
    assert {kind_of(name) for name in same} == {"kernel_launches"}
    assert kind_of("cudaGraphLaunch_v10000") == "graph_launches"
    assert kind_of("cudaLaunchKernelNot") is None
    assert kind_of("cudaStreamIsCapturing_v10000") is None


def test_no_name_is_of_two_kinds() -> None:
    names = [name for names in KINDS.values() for name in names]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_marks_are_read_from_pytorchs_profiler() -> None:
    import torch

    profiler = open_profiler()
    profiler.start()
    for _ in range(3):
        with torch.profiler.record_function(STEP):
            pass
        torch.ones(8).sum()
    profiler.stop()
    calls, marks = read_calls(profiler)
    assert len(marks) == 3
    assert marks == sorted(marks)
    assert calls == [] or torch.cuda.is_available()
