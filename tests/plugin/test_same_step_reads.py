"""Which steps may read K/V that they write: what vLLM's scheduler says, run for real."""

from types import SimpleNamespace
from typing import Any

import pytest

from nwor_bench.plugin.runner_v2.plan import may_read_this_step


def output(*computed: int, resumed: tuple[str, ...] = ()) -> Any:
    """A SchedulerOutput: cached tokens of each request that starts, and resumed requests."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=n) for n in computed],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


@pytest.mark.parametrize(
    ("step", "reads"),
    [
        (output(), False),
        (output(0), False),  # nothing cached: it reads its own tokens alone
        (output(32), True),
        (output(0, 32), True),
        (output(resumed=("a-1",)), True),
    ],
)
def test_only_a_request_that_starts_on_cached_tokens_reads_what_others_write(
    step: Any, reads: bool
) -> None:
    assert may_read_this_step(step) is reads
