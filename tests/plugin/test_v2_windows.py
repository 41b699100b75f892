"""What the V2 runner's hook does with the scheduler's word, and without memory for copies."""

from types import SimpleNamespace

import pytest
from v2_pieces import PieceStaging, make_hook, run_step

from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.records.types import BesidePrefill

pytestmark = pytest.mark.slow  # vLLM's runner is imported

REQUESTS = ["a-1", "b-2"]


def starting(name: str, cached: int, tokens: int = 33) -> SimpleNamespace:
    """A request that starts in the step, with that many tokens in the prefix cache."""
    prompt = [1] * 33
    return SimpleNamespace(
        req_id=name,
        num_computed_tokens=cached,
        prompt_token_ids=prompt,
        prefill_token_ids=[1] * tokens,
    )


def test_the_planner_hears_of_a_request_that_starts_on_cached_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = make_hook(monkeypatch)
    for new in ([], [starting("b-2", 32)], [starting("b-2", 0)], []):
        run_step(hook, REQUESTS, new=new)
    assert hook._parts.planner.certain_at_once == [False, True, False, False]


def test_a_resumed_request_is_counted_on_from_what_the_scheduler_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps gave four tokens, of which a reset of the prefix cache dropped two."""
    hook = make_hook(monkeypatch)
    run_step(hook, ["a-1"])
    run_step(hook, ["a-1"])
    run_step(hook, ["a-1"], new=[starting("a-1", 32, tokens=33 + 2)])
    run_step(hook, ["a-1"])
    run_step(hook, ["a-1"])
    windows = hook.drain({"a": 6})
    assert [window["uncounted_draft_tokens"] for window in windows[2:]] == [0, 0, 2]


@pytest.mark.parametrize(
    ("chosen", "prefilled", "reason"),
    [
        (BesidePrefill.DIRECT, 0, None),
        (BesidePrefill.DIRECT, 7, BESIDE_PREFILL),
        (BesidePrefill.STAGE, 7, None),
    ],
)
def test_beside_a_prefill_windows_are_written_directly_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, chosen: BesidePrefill, prefilled: int, reason: str | None
) -> None:
    hook = make_hook(monkeypatch, beside_prefill=chosen)
    run_step(hook, REQUESTS, prefilled=prefilled)
    run_step(hook, REQUESTS)
    found = [window["fallback_reason"] for window in hook.drain({"a": 9, "b": 9})]
    assert found == [reason, None]


def test_without_memory_for_copies_windows_are_written_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "copy_buffers:OutOfMemoryError"
    monkeypatch.setattr(PieceStaging, "allocate", lambda self: reason)
    hook = make_hook(monkeypatch)
    run_step(hook, REQUESTS)
    (window,) = hook.drain({"a": 9, "b": 9})
    assert (window["fallback_reason"], window["staged_tokens"]) == (reason, 0)
    assert (hook.buffers, hook.window, hook.staging_unavailable) == (None, None, reason)
    assert hook.device_errors() == []


def test_mode_off_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PieceStaging] = []
    monkeypatch.setattr(PieceStaging, "allocate", lambda self: asked.append(self))
    hook = make_hook(monkeypatch)
    assert len(asked) == 1
    hook.set_modes(type(hook.nwor_mode)("off"), hook.validator.mode)
    assert len(asked) == 1
