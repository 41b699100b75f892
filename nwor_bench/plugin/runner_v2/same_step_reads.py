"""Does a request of this step read K/V that another request writes in the same step?

vLLM publishes a block in its prefix cache when it schedules the token that completes the block,
which may be the certain token of a window. A request that starts in that same step can hit the
block. If only one of its own tokens is left, vLLM pads it with drafts of -1, and the step looks
like any step of equal windows.
"""

from typing import Any


def may_read_this_step(scheduler_output: Any) -> bool:
    """True where a request starts, or starts again, on top of cached tokens.

    Only then can a step read what it writes: running requests read blocks of their own, and a
    block is looked up when a request starts. Whether the block is new is not asked, since with
    async scheduling the host does not know how far each request has come.

    Args:
        scheduler_output: vLLM's SchedulerOutput of the step.
    """
    if any(new.num_computed_tokens > 0 for new in scheduler_output.scheduled_new_reqs):
        return True
    # The V2 runner is given a preempted request as a new one, V1 as a resumed one.
    return bool(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
