"""What a server in which draft counts are interleaved changes in vLLM, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from nwor_bench.instruments.draft_counts import schedule_of
from nwor_bench.plugin.draft_patches import interleave_counts, name_counts
from nwor_bench.records.window_order import UNDELIVERED


class Scheduler:
    """Schedules what a test says, and cuts a request's tokens off behind its limit, as stock."""

    dynamic_sd_lookup, limit = [0, 0, 1, 2], 6
    drafts = 0

    def schedule(self) -> Any:
        tokens = {"r0": 1 + self.drafts} if self.drafts else {"new": 50}
        return SimpleNamespace(
            scheduled_new_reqs=[],
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={"r0": [-1] * self.drafts} if self.drafts else {},
        )

    def _update_request_with_output(
        self, request: list[int], tokens: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        del tokens[max(self.limit - len(request), 0) :]
        request += tokens
        return tokens, len(request) >= self.limit


def test_tokens_behind_a_requests_last_one_come_with_the_next_step_with_drafts() -> None:
    scheduler, request = Scheduler(), [0, 0, 0]
    interleave_counts(scheduler, 2)

    def told(drafts: int) -> int | None:
        scheduler.drafts = drafts
        return getattr(scheduler.schedule(), UNDELIVERED, None)

    def update(*tokens: int) -> tuple[list[int], bool]:
        return scheduler._update_request_with_output(request, [*tokens])

    assert [told(0), told(2)] == [None, 0]
    assert update(1, 2) == ([1, 2], False)
    assert told(2) == 0
    assert update(1, 2, 3) == ([1], True)
    assert [told(0), told(2), told(2)] == [None, 2, 0]  # a prefill verifies nothing


ADAPTIVE = "enable_adaptive_verification"


def configuration(ranks: int = 1, **changed: Any) -> Any:
    values = {"method": "eagle3", "num_speculative_tokens": 4, ADAPTIVE: False}
    parallel = SimpleNamespace(data_parallel_size=ranks)
    return SimpleNamespace(**values | changed, target_parallel_config=parallel)


@pytest.mark.parametrize(
    ("config", "most", "field", "value", "words"),
    [
        (None, None, "--speculative-config", None, "VLLM_NWOR_DRAFTS needs it"),
        (configuration(method="ngram"), None, "--speculative-config: method", "ngram", "only"),
        (configuration(**{ADAPTIVE: True}), None, f"--speculative-config: {ADAPTIVE}", True,
         "leave it out"),
        (configuration(ranks=2), None, "--data-parallel-size", 2, "one draft count"),
        (configuration(), 4, "--max-num-seqs", 4, "write 5 or more"),
    ],
)  # fmt: skip
def test_what_cannot_change_its_count_is_refused_by_name(
    config: Any, most: int | None, field: str, value: Any, words: str
) -> None:
    with refused(field, value=value, naming=words):
        name_counts(config, most)


@pytest.mark.parametrize("most", [None, 5])
def test_every_count_is_named_before_graphs_are_captured(most: int | None) -> None:
    config = configuration(num_speculative_tokens_per_batch_size=[(1, 8, 2)])
    name_counts(config, most)
    assert config.num_speculative_tokens_per_batch_size == schedule_of(range(5))
