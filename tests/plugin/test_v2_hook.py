"""The V2 runner's hook on a runner made of pieces: steps, drafts, prefills, and what it keeps."""

import gc
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from v2_pieces import PieceStaging, input_batch_of, make_hook, make_runner, run_step, scheduled

from nwor_bench.plugin import late_counts
from nwor_bench.plugin import step as of_step
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.records.types import BesidePrefill, NworMode, ScvMode

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


def runner_of_two_requests() -> Any:
    """A runner with a KV connector, so that nothing is staged; each request accepts one draft."""
    parallel = SimpleNamespace(data_parallel_size=1, use_ubatching=False)
    runner = make_runner()
    vars(runner).update(
        compilation_config=SimpleNamespace(static_forward_context={}),
        vllm_config=SimpleNamespace(kv_transfer_config=object()),
        parallel_config=parallel,
        lora_config=None,
        use_pp=False,
        dcp_size=1,
        pcp_manager=None,
        adaptive_verification=None,
        ubatch_runner=None,
        num_speculative_steps=4,
        max_num_reqs=2,
        dtype=torch.float32,
        prepare_attn=lambda input_batch: (None, torch.zeros(1, 10)),
        draft_tokens_handler=SimpleNamespace(req_ids=["a-1", "b-2"]),
        sample=lambda *args: (None, torch.tensor([2, 2], dtype=torch.int32), None),
    )
    return runner


def window_of(
    monkeypatch: pytest.MonkeyPatch, lengths: dict[str, int] | None = None, **arguments: Any
) -> dict[str, Any]:
    """One window through the hook, as a worker in a process of its own sees it.

    `arguments`: how many drafts of request a may be accepted, whether the step waited for tokens.
    """
    from nwor_bench.plugin.rank_vote import RankVote
    from nwor_bench.plugin.runner_v2.hook import V2RunnerHook

    monkeypatch.setattr(RankVote, "of_worker", RankVote)
    runner = runner_of_two_requests()
    hook = V2RunnerHook(runner, PluginSettings(NworMode.STAGE, ScvMode.OFF, False))
    hook.attach()
    hook.set_modes(NworMode.STAGE, ScvMode.OFF)
    step = scheduled(
        ["a-1", "b-2"],
        drafts=4,
        pending_structured_output_tokens=arguments.get("waited", True),
        num_invalid_spec_tokens=None,  # for ever: the scheduler writes into its own copy
    )
    batch = input_batch_of(["a-1", "b-2"], 4)
    allowed = arguments.get("allowed")
    grammar = None
    if allowed is not None:
        grammar = SimpleNamespace(
            structured_output_request_ids=["a-1"], num_acceptable_drafts=[allowed]
        )
    runner.execute_model(step)
    runner.prepare_attn(batch)
    runner.sample(None, batch, grammar)
    (window,) = hook.drain(lengths)
    hook.detach()
    return window


def test_drafts_that_a_grammar_forbids_are_not_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler validates them when the forward has been launched, maybe in another process."""
    window = window_of(monkeypatch, allowed=1)
    assert window["fallback_reason"] == "kv_transfer"
    assert (window["draft_tokens"], window["uncounted_draft_tokens"]) == (8, 3)
    assert (window["accepted_tokens"], window["uncounted_accepted_tokens"]) == (2, 0)
    assert window["drafts_per_position"] == (2, 1, 1, 1)


@pytest.mark.parametrize("arguments", [{}, {"allowed": 4}, {"allowed": 1, "waited": False}])
def test_all_drafts_count_where_none_is_forbidden(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    window = window_of(monkeypatch, **arguments)
    assert (window["draft_tokens"], window["uncounted_draft_tokens"]) == (8, 0)
    assert window["drafts_per_position"] == (2, 2, 2, 2)


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
    monkeypatch.setattr(of_step, "MAX_UNDRAINED", 500)
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
    assert hook.late._sampled_before == {}
    assert len(hook.drain(None)) == 200
