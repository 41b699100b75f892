"""Drafts that a grammar forbids: vLLM verifies them, and its statistics leave them out.

With async scheduling a window is scheduled before its drafts are known. The scheduler judges them
while the forward runs and writes how many it forbade into its own SchedulerOutput
(`num_invalid_spec_tokens`), which a worker in another process never sees. What every worker is
given, with whichever executor, is the grammar's output: how many of each request's drafts may be
accepted.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def invalid_drafts(
    scheduler_output: Any, grammar_output: Any, judged: Collection[str]
) -> Mapping[str, int]:
    """What the scheduler will leave out of its statistics, read from what a worker is given.

    Only a step that waited for earlier tokens (`pending_structured_output_tokens`) has its drafts
    judged; drafts of any other step were judged before they were scheduled.

    Args:
        scheduler_output: vLLM's SchedulerOutput of the step, in any process.
        grammar_output: vLLM's GrammarOutput of the step, or None.
        judged: requests whose drafts the runner handed to the scheduler; one that sat out the
            step before keeps its placeholders, and vLLM counts those as drafts.

    Returns:
        Forbidden drafts by request, of those that have some.
    """
    if grammar_output is None or not scheduler_output.pending_structured_output_tokens:
        return {}
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    req_ids = grammar_output.structured_output_request_ids
    # vLLM's word on a grammar output without numbers: none of the drafts may be accepted.
    acceptable = grammar_output.num_acceptable_drafts or [0] * len(req_ids)
    invalid = {
        req_id: len(scheduled.get(req_id, ())) - allowed
        for req_id, allowed in zip(req_ids, acceptable, strict=True)
        if req_id in judged
    }
    return {req_id: drafts for req_id, drafts in invalid.items() if drafts}


def valid_drafts(
    drafts: Sequence[int], req_ids: Sequence[str], invalid: Mapping[str, int] | None
) -> list[int]:
    """Each request's drafts less those that are forbidden, which are what vLLM counts."""
    if not invalid:
        return list(drafts)
    return [n - invalid.get(req_id, 0) for n, req_id in zip(drafts, req_ids, strict=True)]
