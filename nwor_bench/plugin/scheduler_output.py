"""Requests and drafts in vLLM's SchedulerOutput and GrammarOutput.

Drafts that a grammar forbids are verified, but left out of vLLM's statistics. With async scheduling
the scheduler checks them while the forward runs and notes them in its own SchedulerOutput, which a
worker in another process never sees. From vLLM 0.32 on every worker gets the grammar's output: how
many of each request's drafts may be accepted.

Differences between vLLM 0.31 to 0.33 are found on vLLM's objects, never by its version, and only
here and in `refusals`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def external_request_id(req_id: str) -> str:
    """The caller's name of a request: vLLM appends a dash and a random suffix."""
    return req_id.rpartition("-")[0] or req_id


def starts_requests(scheduler_output: Any) -> bool:
    """True if a request starts with this step, or goes on after a preemption."""
    started = scheduler_output.scheduled_new_reqs
    return bool(started or scheduler_output.scheduled_cached_reqs.resumed_req_ids)


def restarted(scheduler_output: Any) -> Mapping[str, int]:
    """Requests that go on after a preemption, with their tokens: perhaps fewer than sampled."""
    known = {}
    for new in scheduler_output.scheduled_new_reqs:  # the V2 runner's form
        if new.prefill_token_ids is None or new.prompt_token_ids is None:
            continue  # V1 gets no tokens, and a prompt of embeddings has none
        tokens = len(new.prefill_token_ids) - len(new.prompt_token_ids)
        if tokens > 0:
            known[new.req_id] = tokens
    cached = scheduler_output.scheduled_cached_reqs  # V1's
    if cached.resumed_req_ids:
        counts = zip(cached.req_ids, cached.num_output_tokens, strict=True)
        known |= {req_id: n for req_id, n in counts if req_id in cached.resumed_req_ids}
    return known


def invalid_drafts(
    scheduler_output: Any, grammar_output: Any, checked: Collection[str]
) -> Mapping[str, int]:
    """Forbidden drafts by request, which the scheduler leaves out of its statistics.

    Only a step that waited for earlier tokens (`pending_structured_output_tokens`) has its drafts
    checked late; others were checked before they were scheduled.

    Args:
        checked: requests whose drafts the runner handed to the scheduler; others keep their
            placeholders, which vLLM counts as drafts.
    """
    if grammar_output is None or not scheduler_output.pending_structured_output_tokens:
        return {}
    if not hasattr(grammar_output, "num_acceptable_drafts"):
        # vLLM 0.31: only the scheduler's own process has them; others count them as drafts.
        return scheduler_output.num_invalid_spec_tokens or {}
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    req_ids = grammar_output.structured_output_request_ids
    # Without numbers no draft may be accepted.
    acceptable = grammar_output.num_acceptable_drafts or [0] * len(req_ids)
    invalid = {
        req_id: len(scheduled.get(req_id, ())) - allowed
        for req_id, allowed in zip(req_ids, acceptable, strict=True)
        if req_id in checked
    }
    return {req_id: drafts for req_id, drafts in invalid.items() if drafts}


def valid_drafts(
    drafts: ArrayLike, req_ids: Sequence[str], invalid: Mapping[str, int] | None
) -> np.ndarray:
    """Each request's drafts without the forbidden ones, as vLLM counts them.

    Args:
        drafts: [requests] int.

    Returns:
        [requests] int.
    """
    every = np.asarray(drafts)
    if not invalid:
        return every
    return every - np.array([invalid.get(req_id, 0) for req_id in req_ids])
