"""Requests and their drafts, read from vLLM's own scheduler output and grammar output."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin.scheduler_output import invalid_drafts, restarted


def new_request(name: str, prompt: int, prefill: int | None) -> Any:
    from vllm.v1.core.sched.output import NewRequestData

    tokens = {"prompt_token_ids": prompt, "prefill_token_ids": prefill}
    given = {field: number and [1] * number for field, number in tokens.items()}
    return NewRequestData(
        **dict.fromkeys(NewRequestData.__annotations__) | given | {"req_id": name}
    )


@pytest.mark.slow  # vLLM is imported
def test_a_preempted_request_goes_on_in_both_runners() -> None:
    """V2 is given it as a new request with its tokens so far, V1 as a resumed one."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        new_request("v2-1", 5, 9), new_request("fresh-1", 5, 5), new_request("v1-2", 5, None)
    ]  # fmt: skip
    step.scheduled_cached_reqs = replace(
        CachedRequestData.make_empty(),
        req_ids=["r-1", "v1-1"],
        resumed_req_ids={"v1-1"},
        num_output_tokens=[7, 3],
    )
    assert restarted(step) == {"v2-1": 4, "v1-1": 3}


@pytest.mark.parametrize(
    ("pending", "grammar", "noted", "invalid"),
    [
        # Without async scheduling no step waits for tokens: placeholders are no verdict.
        (False, {"num_acceptable_drafts": [0]}, None, {}),
        (True, {"num_acceptable_drafts": None}, None, {"a": 4}),
        # vLLM 0.31 has no numbers: in process the scheduler's note is there by then, but a copy for
        # another process has None.
        (True, {}, {"a": 3}, {"a": 3}),
        (True, {}, None, {}),
    ],
    ids=["judged before", "lets no draft pass", "0.31 in process", "0.31"],
)
def test_drafts_that_a_grammar_does_not_take(
    pending: bool, grammar: dict[str, Any], noted: Any, invalid: dict[str, int]
) -> None:
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [-1] * 4},
        pending_structured_output_tokens=pending,
        num_invalid_spec_tokens=noted,
    )
    given = SimpleNamespace(structured_output_request_ids=["a"], **grammar)
    assert invalid_drafts(step, given, ["a"]) == invalid


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
