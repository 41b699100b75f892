"""Draft counts of a server: what each step verifies under any traffic, and what is refused."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.instruments.draft_counts import (
    PATIENCE,
    SPAN,
    schedule_of,
    server_counts,
    verifies,
)
from nwor_bench.plugin.draft_patches import interleave_counts, name_counts
from nwor_bench.records.window_order import PLACE, RUNS, UNDELIVERED, WindowPlace, only_verifies

MOST = 3
COUNTS = server_counts(MOST)
GROUP = RUNS * 3
"""Windows of a group."""


class Scheduler:
    """Verifies what the step before drafted: the lookup's value while that step was scheduled.

    Each step is of `running` requests that decode, and `new` ones that begin with a prompt; 0 and 0
    is the empty step behind the last request. With -1 new ones a request has a draft less, as one
    that comes to its last tokens.
    """

    def __init__(self) -> None:
        self.dynamic_sd_lookup = [0, *range(MOST + 1), *[MOST] * 12]
        self.drafting: list[int] = []
        """Drafts that each step proposes."""
        self._drafted: dict[str, int] = {}
        self._named = 0
        self._original = self.schedule
        self.output_limit = 10**9
        """Tokens of a request, of all that it samples."""
        interleave_counts(self, MOST)

    def _update_request_with_output(
        self, request: list[int], tokens: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """As stock: what is behind the last token is cut off in place."""
        del tokens[max(self.output_limit - len(request), 0) :]
        request += tokens
        return tokens, len(request) >= self.output_limit

    def step(self, running: int, new: int) -> Any:
        self._wanted = (running, new)
        return self.schedule()

    def schedule(self) -> Any:
        running, new = self._wanted
        known = list(self._drafted)[:running]
        begun = [f"r{self._named + number}" for number in range(new)]
        self._named += len(begun)
        drafts = {name: [-1] * n for name in known if (n := self._drafted[name])}
        if drafts and new < 0:
            drafts[known[0]].pop()
        tokens = {name: 1 + len(drafts.get(name, ())) for name in known} | dict.fromkeys(begun, 50)
        k = self.dynamic_sd_lookup[max(len(tokens), 1)]
        assert set(self.dynamic_sd_lookup) == {k}
        if tokens:
            self.drafting.append(k)
            self._drafted = dict.fromkeys(tokens, k)
        return SimpleNamespace(
            scheduled_new_reqs=begun,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
        )


Traffic = Sequence[tuple[int, int]]
"""Running and new requests of each step."""

steady = st.integers(1, 60).map(lambda steps: [(8, 0)] * steps)
busy = st.integers(1, 60).map(lambda steps: [(8, 1)] * steps)
uneven = st.integers(1, 60).map(lambda steps: [(8, -(at % 7 == 0)) for at in range(steps)])
other = st.sampled_from([[(8, 2)], [(0, 0)], [(0, 3)], [(1, 0)], [(2, -1)]])
traffics = (
    st.lists(st.one_of(steady, busy, uneven, other), max_size=12).map(chain.from_iterable).map(list)
)


def run(traffic: Traffic) -> tuple[Scheduler, list[Any]]:
    scheduler = Scheduler()
    outputs = [scheduler.step(0, 2), *(scheduler.step(*each) for each in traffic)]
    return scheduler, [output for output in outputs if output.num_scheduled_tokens]


@examples(300)
@given(traffics)
def test_under_any_traffic_a_placed_window_verifies_and_drafts_its_count(traffic: Traffic) -> None:
    """The last window of a run drafts for the next one, and is not used."""
    scheduler, outputs = run(traffic)
    for output, drafting in zip(outputs, scheduler.drafting, strict=True):
        place = getattr(output, PLACE, None)
        if place is not None:
            assert verifies(output) == COUNTS[place.cell]
            assert place.position == place.run_length - 1 or drafting == COUNTS[place.cell]
        if output.scheduled_new_reqs:
            assert place is None
            assert not only_verifies(output)


@examples(300)
@given(traffics)
def test_under_any_traffic_groups_are_whole_or_cut_never_joined(traffic: Traffic) -> None:
    _, outputs = run(traffic)
    placed = [(at, place) for at, each in enumerate(outputs) if (place := getattr(each, PLACE, 0))]
    for _, group in groupby(placed, key=lambda each: each[1].group):
        own = list(group)
        steps, places = zip(*own, strict=True)
        assert [3 * p.run + p.position for p in places] == list(range(len(places)))
        assert all(after == before + 1 for before, after in pairwise(steps))


@examples(300)
@given(traffics)
def test_under_any_traffic_no_draft_count_stays(traffic: Traffic) -> None:
    """Also where each step has a prefill: a span, the wait for a group, and the next span."""
    scheduler, _ = run(traffic)
    longest = max(len(list(own)) for _, own in groupby(scheduler.drafting))
    assert longest <= 2 * (SPAN + PATIENCE)


def places(outputs: Sequence[Any]) -> list[WindowPlace]:
    return [place for each in outputs if (place := getattr(each, PLACE, None))]


def test_all_counts_take_turns_and_k_0_is_rare() -> None:
    scheduler, outputs = run([(8, 0)] * 6400)
    groups = Counter(
        max(place.cell for place in own)
        for _, group in groupby(places(outputs), key=lambda place: place.group)
        if len(own := list(group)) == GROUP
    )
    assert set(groups) == {1, 2, 3, MOST + 1}  # the last is k = 0 against itself
    assert max(groups.values()) - min(groups.values()) <= 1
    shares = {k: n / 6400 for k, n in Counter(scheduler.drafting).items()}
    assert 0.1 < shares[0] < 0.2
    assert all(0.25 < shares[k] < 0.32 for k in (1, 2, 3))


def test_tokens_behind_a_requests_last_one_come_with_the_next_step_with_drafts() -> None:
    scheduler = Scheduler()
    scheduler.output_limit = 6
    request = [0, 0, 0]

    def update(*tokens: int) -> tuple[list[int], bool]:
        return scheduler._update_request_with_output(request, [*tokens])

    outputs = [scheduler.step(0, 2), scheduler.step(8, 0)]
    assert update(1, 2) == ([1, 2], False)
    outputs.append(scheduler.step(8, 0))
    assert update(1, 2, 3) == ([1], True)
    outputs.append(scheduler.step(0, 2))  # a prefill verifies nothing
    outputs += [scheduler.step(8, 0), scheduler.step(8, 0)]
    found = [getattr(output, UNDELIVERED, None) for output in outputs]
    assert found == [None, 0, 0, None, 2, 0]


def test_with_a_prefill_in_each_step_only_spans_are_left() -> None:
    scheduler, outputs = run([(8, 1)] * 3 * (SPAN + PATIENCE))
    assert places(outputs) == []
    spans = [(k, len(list(own))) for k, own in groupby(scheduler.drafting)]
    assert {1, 2, 3} <= {k for k, steps in spans if steps >= SPAN}


def configuration(**changed: Any) -> Any:
    values: dict[str, Any] = {"method": "eagle3", "num_speculative_tokens": 4,
                              "enable_adaptive_verification": False}  # fmt: skip
    ranks = changed.pop("ranks", 1)
    parallel = SimpleNamespace(data_parallel_size=ranks)
    return SimpleNamespace(**{**values, **changed}, target_parallel_config=parallel)


@pytest.mark.parametrize(
    ("config", "most", "field", "value", "words"),
    [
        (None, None, "--speculative-config", None, "VLLM_NWOR_DRAFTS needs it"),
        (configuration(method="ngram"), None, "--speculative-config: method", "ngram", "only"),
        (
            configuration(enable_adaptive_verification=True), None,
            "--speculative-config: enable_adaptive_verification", True, "leave it out",
        ),
        (configuration(ranks=2), None, "--data-parallel-size", 2, "one draft count"),
        (configuration(), 4, "--max-num-seqs", 4, "write 5 or more"),
    ],
)  # fmt: skip
def test_what_cannot_change_its_count_is_refused_by_name(
    config: Any, most: int | None, field: str, value: Any, words: str
) -> None:
    with refused(field, value=value, naming=words):
        name_counts(config, most)


@pytest.mark.parametrize("most", [None, 5, 256])
def test_every_count_is_named_before_graphs_are_captured(most: int | None) -> None:
    config = configuration(num_speculative_tokens_per_batch_size=[(1, 8, 2)])
    name_counts(config, most)
    assert config.num_speculative_tokens_per_batch_size == schedule_of(range(5))
