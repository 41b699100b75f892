"""Which requests a step ends, and which start again: what a worker is told by the scheduler."""

from collections.abc import Collection, Mapping
from typing import Any


def finished(scheduler_output: Any) -> Collection[str]:
    """Requests that ended since the last step; none of them is in a later step.

    Steps without tokens name them too: the last requests of a server end with one.
    """
    ended: Collection[str] = scheduler_output.finished_req_ids
    return ended


def restarted(scheduler_output: Any) -> Mapping[str, int]:
    """Requests that go on after a preemption, with the tokens that the scheduler has of each.

    Their number may be below what was sampled: tokens of a step that was in flight are dropped
    where the preemption came from a reset of the prefix cache.
    """
    known = {}
    for new in scheduler_output.scheduled_new_reqs:  # the V2 runner's form
        if new.prefill_token_ids is None or new.prompt_token_ids is None:
            continue  # V1 is given no tokens, and a prompt of embeddings has none
        tokens = len(new.prefill_token_ids) - len(new.prompt_token_ids)
        if tokens > 0:
            known[new.req_id] = tokens
    cached = scheduler_output.scheduled_cached_reqs  # V1's
    if cached.resumed_req_ids:
        each = zip(cached.req_ids, cached.num_output_tokens, strict=True)
        known |= {req_id: n for req_id, n in each if req_id in cached.resumed_req_ids}
    return known
