"""What the V2 runner's hook notes of a step, on a runner that only says what was asked of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records import NworMode, ScvMode

pytestmark = pytest.mark.slow  # vLLM's runner is imported

DRAFTS = np.array([4, 4], dtype=np.int32)


def runner_of_two_requests() -> Any:
    """A runner with LoRA, so that nothing is staged; each request accepts one draft."""
    parallel = SimpleNamespace(data_parallel_size=1, use_ubatching=False)
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
        compilation_config=SimpleNamespace(static_forward_context={}),
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        parallel_config=parallel,
        lora_config=object(),
        use_pp=False,
        dcp_size=1,
        pcp_manager=None,
        adaptive_verification=None,
        ubatch_runner=None,
        cudagraph_manager=None,
        num_speculative_steps=4,
        max_num_reqs=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        execute_model=lambda scheduler_output: None,
        prepare_attn=lambda input_batch: (None, torch.zeros(1, 10)),
        sample=lambda *args: (None, torch.tensor([2, 2], dtype=torch.int32), None),
    )


@pytest.mark.parametrize("late", [True, False], ids=["during the forward", "before it"])
def test_drafts_that_a_grammar_forbids_are_not_vllms(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With async scheduling the scheduler judges them when the forward has been launched."""
    from nwor_bench.plugin.rank_vote import RankVote
    from nwor_bench.plugin.runner_v2 import V2RunnerHook

    monkeypatch.setattr(RankVote, "of_worker", RankVote)
    runner = runner_of_two_requests()
    hook = V2RunnerHook(runner, PluginSettings(NworMode.STAGE, ScvMode.OFF, False))
    hook.attach()
    hook.set_modes(NworMode.STAGE, ScvMode.OFF)
    forbidden = {"a-1": 3}
    step = SimpleNamespace(
        total_num_scheduled_tokens=10,
        scheduled_spec_decode_tokens={"a-1": [-1] * 4, "b-2": [-1] * 4},
        num_invalid_spec_tokens=None if late else forbidden,
    )
    runner.execute_model(step)
    runner.prepare_attn(
        SimpleNamespace(
            req_ids=["a-1", "b-2"],
            num_tokens=10,
            num_reqs=2,
            num_draft_tokens=8,
            num_draft_tokens_per_req=DRAFTS,
        )
    )
    step.num_invalid_spec_tokens = forbidden
    runner.sample()
    (window,) = hook.drain(None)
    hook.detach()
    assert window["fallback_reason"] == "lora"
    assert (window["draft_tokens"], window["uncounted_draft_tokens"]) == (8, 3)
    assert (window["accepted_tokens"], window["uncounted_accepted_tokens"]) == (2, 0)
