"""Who ended and who starts again, read from vLLM's own scheduler output."""

from typing import Any

import pytest

from nwor_bench.plugin.counts.scheduler_output import finished, restarted

pytestmark = pytest.mark.slow  # vLLM is imported


def output(new: list[Any], resumed: dict[str, int], running: dict[str, int]) -> Any:
    """vLLM's SchedulerOutput; output tokens of resumed and of running requests."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    both = {**running, **resumed}
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs = new
    made.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(both),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(both),
        num_computed_tokens=[0] * len(both),
        num_output_tokens=list(both.values()),
    )
    made.finished_req_ids = {"gone-1"}
    return made


def new_request(name: str, prompt: int, prefill: int | None) -> Any:
    from vllm.v1.core.sched.output import NewRequestData

    return NewRequestData(
        req_id=name,
        prompt_token_ids=[1] * prompt,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=None if prefill is None else [1] * prefill,
    )


def test_a_new_request_starts_from_nothing() -> None:
    step = output([new_request("v2-1", 5, 5), new_request("v1-1", 5, None)], {}, {"r-1": 7})
    assert restarted(step) == {}
    assert finished(step) == {"gone-1"}


def test_a_preempted_request_goes_on_in_both_runners() -> None:
    """V2 is given it as a new request with its tokens so far, V1 as a resumed one."""
    step = output([new_request("v2-1", 5, 9)], {"v1-1": 3}, {"r-1": 7})
    assert restarted(step) == {"v2-1": 4, "v1-1": 3}
