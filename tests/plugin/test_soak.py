"""A server's plugin holds as much memory after many requests as after some."""

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from v2_pieces import make_hook, run_step

from nwor_bench.plugin import late_counts

pytestmark = pytest.mark.slow  # vLLM's runner is imported, and thousands of steps run

AT_ONCE = 8
WINDOWS_EACH = 2
READ_EVERY = 400
"""Steps between two readings of the counts, as a server's metrics ask for them."""


def serve(hook: Any, requests: int, report_every: int, reads: bool = True) -> Iterator[int]:
    """Serve requests, eight at a time; yields how many have ended, every now and then.

    Names are those of vLLM's API server, which are never used twice.

    Args:
        hook: from `v2_pieces.make_hook`.
        requests: how many come, a multiple of eight.
        report_every: requests between two yields.
        reads: somebody reads the counts now and then; False: metrics are off.
    """
    steps, ended, last = 0, 0, set[str]()
    while ended < requests:
        names = [f"chatcmpl-{ended + place:032x}-{place:08x}" for place in range(AT_ONCE)]
        for _ in range(WINDOWS_EACH):
            run_step(hook, names, last)
            last = set()
            steps += 1
            if reads and steps % READ_EVERY == 0:
                hook.late.resolve(None)
        last = set(names)
        ended += AT_ONCE
        if ended % report_every == 0:
            yield ended
    run_step(hook, [], last)  # vLLM's empty step when the last request has ended


def memory_curve(
    hook: Any, requests: int, report_every: int, reads: bool = True
) -> Iterator[tuple[int, int]]:
    """Requests ended, and the bytes that Python objects made since the start hold."""
    tracemalloc.start()
    try:
        for ended in serve(hook, requests, report_every, reads):
            gc.collect()
            yield ended, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


BYTES_A_NAME = 100
"""A request's name alone takes more: what grows by it grows with every request."""


@pytest.mark.long
@pytest.mark.parametrize("reads", [True, False], ids=["metrics read", "nobody reads"])
def test_memory_does_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    # What waits for a reading or a drain is full before the first look: the rest is growth.
    monkeypatch.setattr(late_counts, "MAX_UNDRAINED", 500)
    monkeypatch.setattr(late_counts, "MOST_PENDING", 100)
    hook = make_hook(monkeypatch)
    curve = dict(memory_curve(hook, 24_000, 8_000, reads))
    growth = curve[24_000] - curve[8_000]
    assert growth < 16_000 * BYTES_A_NAME / 20


def test_every_request_is_forgotten_when_the_last_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = make_hook(monkeypatch)
    for _ in serve(hook, 800, 800):
        pass
    hook.late.resolve(None)
    assert hook.late.requests_known == 0
    assert hook.accumulator.totals["windows"] == 200
