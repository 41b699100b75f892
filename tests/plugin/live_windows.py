"""Windows of a server, as its worker records them, and steps as vLLM schedules them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_order import (
    Order,
    WindowPlace,
    only_verifies,
    places_of,
)


def windows_alone(requests: int = 2, drafts: int = 4) -> Any:
    """A step of nothing but windows."""
    return scheduled({f"r{n}": drafts for n in range(requests)}, 0)


def with_prefill(requests: int = 2) -> Any:
    """A step's windows with a prompt of 100 tokens beside them."""
    return scheduled({f"r{n}": 4 for n in range(requests)}, 100)


def idle() -> Any:
    """The empty step that follows the last request."""
    return scheduled({}, 0)


def scheduled(drafts: dict[str, int], prompt: int) -> Any:
    tokens = {name: n + 1 for name, n in drafts.items()}
    if prompt:
        tokens["new"] = prompt
    return SimpleNamespace(
        scheduled_spec_decode_tokens={name: [0] * n for name, n in drafts.items()},
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def counts_of(num_reqs: int = 2, **changed: Any) -> WindowRecord:
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


def timed(
    wall: float | None, device: float | None = None, num_reqs: int = 2, **changed: Any
) -> WindowRecord:
    """A window with these times."""
    return counts_of(num_reqs, wall_ms=wall, device_ms=device, **changed)


def switching(
    hook: Any, cells: Sequence[tuple[str, str]], pairs: Sequence[tuple[int, int]] = ((0, 1),)
) -> ModeSwitch:
    """Cells of one batch, whose order this worker has."""
    return ModeSwitch(hook, cells, Order(places_of(pairs, "a")))


def next_place(switch: ModeSwitch, step: Any) -> WindowPlace | None:
    """The place of a step, as the hook asks for it."""
    return switch.next(step, only_verifies(step))
