"""Requests and their drafts, read from vLLM's own scheduler output and grammar output."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin.scheduler_output import (
    invalid_drafts,
    restarted,
)


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


@pytest.mark.slow  # vLLM is imported
def test_a_preempted_request_goes_on_in_both_runners() -> None:
    """V2 is given it as a new request with its tokens so far, V1 as a resumed one."""
    new = [new_request("v2-1", 5, 9), new_request("fresh-1", 5, 5), new_request("v1-2", 5, None)]
    step = output(new, {"v1-1": 3}, {"r-1": 7})
    assert restarted(step) == {"v2-1": 4, "v1-1": 3}


def step(pending: bool = True, **drafts: int) -> Any:
    """A scheduler output with so many placeholders for each request."""
    scheduled = {name: [-1] * n for name, n in drafts.items()}
    return SimpleNamespace(
        scheduled_spec_decode_tokens=scheduled, pending_structured_output_tokens=pending
    )


def grammar(**acceptable: int) -> Any:
    """A grammar output that lets so many drafts of each request pass."""
    return SimpleNamespace(
        structured_output_request_ids=list(acceptable),
        num_acceptable_drafts=list(acceptable.values()),
    )


def test_drafts_judged_before_they_were_scheduled_are_not_judged_again() -> None:
    """No step waits for tokens without async scheduling, and then placeholders are no verdict."""
    assert invalid_drafts(step(pending=False, a=4), grammar(a=0), ["a"]) == {}


def test_a_grammar_output_without_numbers_lets_no_draft_pass() -> None:
    silent = grammar(a=4)
    silent.num_acceptable_drafts = None
    assert invalid_drafts(step(a=4), silent, ["a"]) == {"a": 4}


def test_vllm_0_31_says_it_only_in_the_schedulers_own_output() -> None:
    """In process the scheduler's note is there by then; a copy for another process has None."""
    silent = grammar(a=0)
    del silent.num_acceptable_drafts
    output = step(a=4)
    for noted, expected in (({"a": 3}, {"a": 3}), (None, {})):
        output.num_invalid_spec_tokens = noted
        assert invalid_drafts(output, silent, ["a"]) == expected


class FakeScheduler:
    """What two methods of vLLM's scheduler ask of `self`; requests called g... have a grammar."""

    def __init__(self, names: list[str], valid: dict[str, int]):
        self.requests = {
            name: SimpleNamespace(
                request_id=name,
                use_structured_output=name.startswith("g"),
                is_prefill_chunk=False,
                is_finished=lambda: False,
            )
            for name in names
        }
        self.structured_output_manager = SimpleNamespace(
            validate_tokens=lambda request, tokens: (
                tokens[: valid[request.request_id]] if request.use_structured_output else tokens
            ),
            grammar_bitmask=lambda *_: None,
        )


REQUESTS = st.dictionaries(
    st.sampled_from(["g1", "g2", "g3", "f1", "f2"]),
    # drafts scheduled, drafts that the grammar takes, whether the drafter proposed any
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()),
    min_size=1,
)


@pytest.mark.slow  # vLLM's scheduler is imported
@examples(200)
@given(requests=REQUESTS)
def test_a_worker_reads_what_vllms_scheduler_counts(
    requests: dict[str, tuple[int, int, bool]],
) -> None:
    """The worker's copy is made before the scheduler validates: it may be another process."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds

    scheduler: Any = FakeScheduler(list(requests), {n: r[1] for n, r in requests.items()})
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: drafts + 1 for name, (drafts, _, _) in requests.items()}
    output.scheduled_spec_decode_tokens = {
        name: [-1] * drafts for name, (drafts, _, _) in requests.items() if drafts
    }
    output.has_structured_output_requests = any(name.startswith("g") for name in requests)
    output.pending_structured_output_tokens = output.has_structured_output_requests
    copy = pickle.loads(pickle.dumps(output))
    proposing = [name for name, (_, _, proposed) in requests.items() if proposed]
    proposals = DraftTokenIds(proposing, [[7] * 4 for _ in proposing])
    Scheduler.update_draft_token_ids_in_output(scheduler, proposals, output)
    grammar_output = Scheduler.get_grammar_bitmask(scheduler, output)
    assert copy.num_invalid_spec_tokens is None
    assert invalid_drafts(output, grammar_output, proposing) == output.num_invalid_spec_tokens
    told = grammar_output is None or hasattr(grammar_output, "num_acceptable_drafts")
    expected = output.num_invalid_spec_tokens if told else {}
    assert invalid_drafts(copy, grammar_output, proposing) == expected
