"""Windows of a server, as its worker records them, and steps as vLLM schedules them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_order import Order, WindowPlace, only_verifies, places_of


def scheduled(drafts: dict[str, int], prompt: int = 0) -> Any:
    """A step of windows of so many drafts, and a prompt of this length beside them."""
    tokens = {name: n + 1 for name, n in drafts.items()} | ({"new": prompt} if prompt else {})
    return SimpleNamespace(
        scheduled_spec_decode_tokens={name: [0] * n for name, n in drafts.items()},
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


TWO = {"r0": 4, "r1": 4}
WINDOWS, PREFILL, IDLE = scheduled(TWO), scheduled(TWO, 100), scheduled({})
"""Nothing but windows, with a prefill beside them, and the empty step behind the last request."""


def counts_of(num_reqs: int = 2, **changed: Any) -> WindowRecord:
    """A window in which each request accepted one of four drafts, staged in three layers."""
    values = {
        "num_reqs": num_reqs,
        "draft_tokens": 4 * num_reqs,
        "accepted_tokens": num_reqs,
        "staged_tokens": 4 * num_reqs,
        "committed_tokens": num_reqs,
        "rejected_tokens": 3 * num_reqs,
        "stage_operations": 12 * num_reqs,
        "fallback_reason": None,
    }
    return WindowRecord(**(values | changed))


def verified(k: int, requests: int, accepted: int = 0, **more: Any) -> WindowRecord:
    """A window in which each request verified k drafts and nothing was staged."""
    nothing = ("staged_tokens", "committed_tokens", "rejected_tokens", "stage_operations")
    values = {**dict.fromkeys(nothing, 0), "draft_tokens": k * requests, **more}
    return counts_of(requests, accepted_tokens=accepted, **values)


def switching(
    hook: Any, cells: Sequence[tuple[str, str]], pairs: Sequence[tuple[int, int]] = ((0, 1),)
) -> ModeSwitch:
    """Cells of one batch, whose order this worker has."""
    return ModeSwitch(hook, cells, Order(places_of(pairs, "a")))


def next_place(switch: ModeSwitch, step: Any) -> WindowPlace | None:
    """The place of a step, as the hook asks for it."""
    return switch.next(step, only_verifies(step))
