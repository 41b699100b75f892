"""A server's plugin holds as much memory after many requests as after some."""

import pytest
from soak import memory_curve, serve
from v2_pieces import make_hook

from nwor_bench.plugin.counts import late_counts

pytestmark = pytest.mark.slow  # vLLM's runner is imported, and thousands of steps run

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
