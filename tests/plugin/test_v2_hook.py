"""The V2 runner's hook on a runner made of pieces: steps, drafts, prefills, and what it keeps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from v2_pieces import PieceStaging, input_batch_of, make_hook, make_runner, run_step, scheduled

from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.records.types import BesidePrefill, NworMode, ScvMode
from nwor_bench.records.window_order import PLACE, WindowPlace

pytestmark = pytest.mark.slow  # vLLM's runner is imported

REQUESTS = ["a-1", "b-2"]


def starting(name: str, cached: int) -> SimpleNamespace:
    """A request that starts in the step, with that many tokens in the prefix cache."""
    prompt = [1] * 33
    return SimpleNamespace(
        req_id=name, num_computed_tokens=cached, prompt_token_ids=prompt, prefill_token_ids=prompt
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
    found = [window.fallback_reason for window in hook.drain({"a": 9, "b": 9})]
    assert found == [reason, None]


def test_without_memory_for_copies_windows_are_written_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "copy_buffers:OutOfMemoryError"
    monkeypatch.setattr(PieceStaging, "allocate", lambda self: reason)
    hook = make_hook(monkeypatch)
    run_step(hook, REQUESTS)
    (window,) = hook.drain({"a": 9, "b": 9})
    assert (window.fallback_reason, window.staged_tokens) == (reason, 0)
    assert (hook.buffers, hook.window, hook.staging_unavailable) == (None, None, reason)
    assert hook.device_errors() == []


def test_mode_off_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PieceStaging] = []
    monkeypatch.setattr(PieceStaging, "allocate", lambda self: asked.append(self))
    make_hook(monkeypatch).set_modes(NworMode.OFF, ScvMode.OFF)
    assert len(asked) == 1


def runner_of_two_requests() -> Any:
    """A runner with a KV connector, so that nothing is staged; each request accepts one draft."""
    return make_runner(
        compilation_config=SimpleNamespace(static_forward_context={}),
        vllm_config=SimpleNamespace(kv_transfer_config=object()),
        parallel_config=SimpleNamespace(data_parallel_size=1, use_ubatching=False),
        lora_config=None, use_pp=False, dcp_size=1, pcp_manager=None, adaptive_verification=None,
        ubatch_runner=None, num_speculative_steps=4, max_num_reqs=2, dtype=torch.float32,
        prepare_attn=lambda input_batch: (None, torch.zeros(1, 10)),
        draft_tokens_handler=SimpleNamespace(req_ids=REQUESTS),
        sample=lambda *args: (None, torch.tensor([2, 2], dtype=torch.int32), None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("allowed", "waited", "forbidden"),
    [(1, True, 3), (None, True, 0), (4, True, 0), (1, False, 0)],
)
def test_drafts_that_a_grammar_forbids_are_not_vllms(
    monkeypatch: pytest.MonkeyPatch, allowed: int | None, waited: bool, forbidden: int
) -> None:
    """The scheduler validates them when the forward has been launched, maybe in another process.

    `allowed`: drafts of request a; `waited`: whether the step waited for tokens.
    """
    from nwor_bench.plugin.rank_vote import RankVote
    from nwor_bench.plugin.runner_v2.hook import V2RunnerHook

    monkeypatch.setattr(RankVote, "of_worker", RankVote)
    runner = runner_of_two_requests()
    hook = V2RunnerHook(runner, PluginSettings(NworMode.STAGE, ScvMode.OFF, False))
    hook.attach()
    hook.set_modes(NworMode.STAGE, ScvMode.OFF)
    grammar = allowed and SimpleNamespace(
        structured_output_request_ids=REQUESTS[:1], num_acceptable_drafts=[allowed]
    )
    # The scheduler writes num_invalid_spec_tokens into its own copy: here it is None for ever.
    more = {"pending_structured_output_tokens": waited, "num_invalid_spec_tokens": None}
    runner.execute_model(scheduled(REQUESTS, drafts=4, **more))
    batch = input_batch_of(REQUESTS, 4)
    runner.prepare_attn(batch)
    runner.sample(None, batch, grammar)
    (window,) = hook.drain(None)
    hook.detach()
    assert window.fallback_reason == "kv_transfer"
    assert (window.draft_tokens, window.uncounted_draft_tokens) == (8, forbidden)
    assert (window.accepted_tokens, window.uncounted_accepted_tokens) == (2, 0)
    assert window.drafts_per_position == ((2, 1, 1, 1) if forbidden else (2, 2, 2, 2))


def test_every_request_is_forgotten_when_the_last_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook, last = make_hook(monkeypatch), set[str]()
    for first in range(0, 800, 8):  # eight at a time, by names that are never used twice
        names = [f"chatcmpl-{first + place:032x}-{place:08x}" for place in range(8)]
        run_step(hook, names, last)
        run_step(hook, names)
        last = set(names)
        if first % 200 == 0:
            hook.late.resolve(None)
    run_step(hook, [], last)  # vLLM's empty step when the last request has ended
    hook.late.resolve(None)
    assert hook.late._sampled_before == {}
    assert len(hook.drain(None)) == 200


def step_of(hook: Any, drafts: Sequence[int], place: Any = None) -> None:
    """A step of windows of so many drafts each, as `nwor-bench worth` schedules it."""
    run_step(hook, REQUESTS, drafts=drafts, **{PLACE: place})


@pytest.mark.parametrize(
    ("drafts", "uniform"),
    [((2, 2), 2), ((1, 1), 1), ((2, 1), None), ((1, 0), None), ((0, 0), None)],
)
def test_the_validator_hears_of_a_count_that_all_requests_have(
    monkeypatch: pytest.MonkeyPatch, drafts: Sequence[int], uniform: int | None
) -> None:
    """The engine's most is 2; draft counts run smaller ones, as evenly, and 0 stages nothing."""
    asked: list[int | None] = []

    def validate(num_sampled: Any, _: Any, own: int | None) -> Any:
        asked.append(own)
        accepted = num_sampled - 1
        return SimpleNamespace(num_accepted=accepted, path="host", fallback_reason=None)

    hook = make_hook(monkeypatch)
    hook.validator.validate = validate
    step_of(hook, drafts)
    assert asked == ([uniform] if sum(drafts) else [])
    (window,) = hook.drain({"a": 9, "b": 9})
    assert (window.draft_tokens, window.staged_tokens) == (sum(drafts),) * 2
    assert window.fallback_reason is None


def test_draft_counts_stage_where_their_places_cells_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps between groups, which have no place, run in mode off."""
    hook = make_hook(monkeypatch)
    followed = ModeSwitch(hook, [("off", "off"), ("stage", "off"), ("off", "off")])
    followed.start()
    for cell in (1, 0, 1, None, 1, 2):
        step_of(hook, (1, 1), None if cell is None else WindowPlace(cell, 0, 0, 1, 0))
    staged = [window.staged_tokens for window in hook.drain({"a": 99, "b": 99})]
    assert staged == [2, 0, 2, 0, 2, 0]
    assert [sorted(facts) for facts in followed.facts()] == [["scv_counters", "scv_fallbacks"]] * 3


def test_contexts_choose_attention_again_once_the_gate_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nwor_bench.plugin.runner_v2.attention_choice import AttentionChoices
    from nwor_bench.plugin.worker import TOOLS, NworWorkerExtension

    hook = make_hook(monkeypatch)
    choices = hook._parts.choices = AttentionChoices([])
    watched = SimpleNamespace(watch=lambda on: None)
    tools = {"rows": watched, "states": watched}
    worker: Any = SimpleNamespace(nwor_hook=hook, **{TOOLS: tools})
    for on in (True, True, False):
        NworWorkerExtension.nwor_watch_blocks(worker, on)
        assert (choices._turns is not None) is on
