"""Draft counts with an engine each: times by block, on simulated runs whose truth is known."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nwor_bench.analysis.changes import token_time_change
from nwor_bench.analysis.draft_rates import (
    MIN_JUDGED,
    AtSize,
    SpanTokens,
    Worth,
    worth_at,
)
from nwor_bench.analysis.engine_times import block_times, steps_of
from nwor_bench.analysis.worth import Measured, times_of, worth_of
from nwor_bench.records.cell import AA, ADAPTIVE, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.header import PairFacts, StoredSpec
from nwor_bench.records.types import Phase, RequestTimes, Verdict
from nwor_bench.stats.interval import Interval, combined
from nwor_bench.stats.paired import paired_ratio

ACCEPTED = {0: (0, 0), 1: (100, 60), 2: (100, 90), ADAPTIVE: (100, 80)}
"""Windows of a request and the drafts accepted in them: 1, 1.6, 1.9 and 1.8 tokens a window."""

STEP = {0: 1.0, 1: 1.2, 2: 1.5, ADAPTIVE: 1.25, None: 1.0}
"""Time of a step at each count, in units of that at k = 0; None: the A/A arm."""


def cell(count: int | None) -> Cell:
    arm = AA if count is None else Drafts(count)
    return Cell("tiny", NworMode.OFF, ScvMode.OFF, arm)


def batch(count: int | None, block: int, step: float, text: int = 0) -> Any:
    """Three requests, whose times per output token scatter around step / tokens of a step."""
    windows, accepted = ACCEPTED[count or 0]
    tokens = 1 + accepted / windows if windows else 1.0
    tpot = tuple(10 * step / tokens * part for part in (0.9, 1.0, 1.1))
    return SimpleNamespace(
        cell=cell(count), phase=Phase.TIMED, block=block, requests=3, output_tokens=3 * 161,
        token_digests=tuple(f"{text}-{n}" for n in range(3)), request_times=RequestTimes((), tpot),
        request_acceptance=((windows, accepted),) * 3,
        request_tokens=((1 + windows + accepted, accepted),) * 3,
    )  # fmt: skip


def run_of(
    steps: Mapping[int | None, list[float]], cut: int | None = None, requests: int = 3
) -> Any:
    """A run with the time of a step by count and block; block `cut` did not end."""
    batches = [
        batch(count, number, step, text=number)
        for count, own in steps.items()
        for number, step in enumerate(own, start=1)
    ]
    blocks = {number for own in steps.values() for number in range(1, len(own) + 1)}
    spec, scenario = StoredSpec(engines=True), {"requests": requests}
    header = SimpleNamespace(spec=spec, pair=PairFacts(), scenario=scenario, blocks=None)
    finished = frozenset((Phase.TIMED, number) for number in blocks - {cut})
    return SimpleNamespace(batches=batches, header=header, finished=finished, windows=())


def simulated(rng: np.random.Generator, blocks: int = 5, noise: float = 0.05) -> Any:
    """Blocks differ by 20 %, all counts of one alike; the rest scatters by `noise`."""
    shared = rng.normal(0, 0.2, blocks)
    return run_of({
        count: list(true * np.exp(shared + rng.normal(0, noise, blocks)))
        for count, true in STEP.items()
    })  # fmt: skip


def test_two_counts_are_compared_as_by_a_paired_t_test() -> None:
    """Mean and scatter of the differences; the A/A arm did not run, so nothing is added. Each
    count has its own scatter: an analysis of variance would give all the same error."""
    steps: dict[int | None, list[float]] = {0: [1.0, 1.3, 0.9, 1.1], 1: [1.2, 1.7, 1.0, 1.3],
                                            2: [1.5 * s for s in (1.0, 1.3, 0.9, 1.1)]}  # fmt: skip
    differences = np.log(steps[1]) - np.log(steps[0])
    found, even = block_times(run_of(steps)).values()
    assert found.value == pytest.approx(differences.mean())
    assert found.error == pytest.approx(differences.std(ddof=1) / 2)  # of four blocks
    assert (found.degrees, found.count, found.offset) == (3, 4, 0)
    assert even.error == pytest.approx(0, abs=1e-9)


def test_an_engine_that_drifts_has_a_wider_interval() -> None:
    """Ten ratios once in random order, once as a drift: the mean of the latter is known
    worse, by what `paired_ratio` adds."""
    drift = [1.2 + 0.02 * place for place in range(10)]
    mixed = [drift[place] for place in (4, 9, 0, 7, 2, 5, 8, 1, 6, 3)]
    errors = []
    for own in (drift, mixed):
        times = block_times(run_of({0: [1.0] * 10, 1: own, None: [1.0] * 10}))
        expected = paired_ratio(own, [1.0] * 10)
        assert expected is not None
        assert times[1].error == pytest.approx(expected.error)
        errors.append(times[1].error)
    assert errors[0] > 1.5 * errors[1]


def test_intervals_are_wider_by_what_the_second_engine_without_a_drafter_shows() -> None:
    """A/A takes 3 % longer in two blocks and 5 % in the others: 4 %, +- Student's t with three
    degrees of freedom, 3.182, times the error of the mean."""
    again = [1.03, 1.05, 1.05, 1.03]
    steps: dict[int | None, list[float]] = {0: [1.0] * 4, 1: [1.2] * 4, 2: [1.5] * 4, None: again}
    found = block_times(run_of(steps))
    logs = np.log(again)
    farther = logs.mean() + 3.182 * logs.std(ddof=1) / 2
    assert [found[k].offset for k in (1, 2, None)] == pytest.approx([farther, farther, 0], rel=1e-3)
    run = Measured(run_of(steps), ())
    one, _ = worth_of([run]).rates
    assert one.ratio.value == pytest.approx(1.6 / 1.2)
    assert one.ratio.low == pytest.approx(1.6 / 1.2 * exp(-farther), rel=1e-3)
    between = combined(0.0, [found[1], found[2]])  # two engines differ as any other two
    assert between.offset == pytest.approx(farther, rel=1e-3)


def test_times_are_those_of_steps_whatever_a_block_has_in_common() -> None:
    """Without noise every count's ratio is exact, although the second block takes twice as long."""
    run = run_of({count: [step, 2 * step, step] for count, step in STEP.items()})
    found = block_times(run)
    assert {count: exp(each.value) for count, each in found.items()} == pytest.approx(
        {count: step for count, step in STEP.items() if count != 0}
    )
    assert max(each.error for each in found.values()) < 1e-9
    assert times_of(Measured(run, ())).keys() == {(k, False) for k in found}


@pytest.mark.slow
def test_intervals_include_the_truth_in_95_percent_of_runs() -> None:
    """All counts of a run together; more, as engines do not differ by themselves here."""
    runs, hits = 60, 0
    for seed in range(runs):
        rates = worth_of([Measured(simulated(np.random.default_rng(seed), 3), ())]).rates
        truth = {k: (1 + ACCEPTED[k][1] / 100) / STEP[k] for k in (1, 2, ADAPTIVE)}
        hits += all(r.ratio.low < truth[r.count] < r.ratio.high for r in rates)
    assert hits / runs > 0.95


def test_the_table_has_tokens_and_times_of_windows_and_their_rate() -> None:
    run = run_of({count: [step] * MIN_JUDGED for count, step in STEP.items()})
    found = worth_of([Measured(run, ())])
    assert found.by_engines
    one, two, adaptive = found.rates
    assert (one.drafts, two.drafts, adaptive.drafts) == (1, 2, 2)
    assert (one.adaptive, two.adaptive, adaptive.adaptive) == (False, False, True)
    for rate, tokens, step in ((one, 1.6, 1.2), (two, 1.9, 1.5), (adaptive, 1.8, 1.25)):
        assert rate.tokens == pytest.approx(tokens)
        assert rate.time_ratio == pytest.approx(step)
        assert rate.ratio.value == pytest.approx(tokens / step)
        assert (rate.groups, rate.verdict) == (MIN_JUDGED, Verdict.FASTER)


def test_a_cut_block_and_a_count_that_left_the_run_do_not_count() -> None:
    """A count that broke parity runs no further block; the others are compared without it."""
    steps: dict[int | None, list[float]] = {0: [1.0] * 4, 1: [1.2] * 4, 2: [1.5] * 2}
    assert {k: each.count for k, each in block_times(run_of(steps)).items()} == {1: 4}
    steps[1][3] = 9.0
    assert block_times(run_of(steps, cut=4))[1].value == pytest.approx(log(1.2))
    (rate,) = worth_of([Measured(run_of({0: [1.0, 1.1], 1: [1.2, 1.3]}), ())]).rates
    assert (rate.ratio, rate.groups, rate.verdict) == (None, 0, Verdict.NOT_MEASURED)


@pytest.mark.parametrize(
    ("method", "output", "accepted", "got", "steps"),
    [
        # 32 and 20 tokens, the first by the prefill. Of 31, 4 were drafts: 27 steps, some without
        # drafts. The last window accepted two drafts that nobody got: 16 of 18 are among the 20.
        ("ngram", 52, ((7, 4), (3, 18)), ((32, 4), (20, 16)), [(27, 4), (3, 16)]),
        # An older run has the mean of its tokens. 31 after the first: 7 windows with 4 accepted
        # drafts give 11, so 20 steps had no draft. 16 windows with 16 give one too many.
        ("ngram", 64, ((7, 4), (16, 16)), (), [(27, 4), (16, 15)]),
        ("eagle", 64, ((14, 17), (16, 16)), (), [(14, 17), (16, 15)]),  # drafts in every step
    ],
)
def test_steps_have_the_tokens_that_a_request_got(
    method: str, output: int, accepted: Any, got: Any, steps: list[tuple[int, int]]
) -> None:
    header: Any = SimpleNamespace(pair=SimpleNamespace(method=method))
    own: Any = SimpleNamespace(requests=2, output_tokens=output, request_acceptance=accepted,
                               request_tokens=got)  # fmt: skip
    assert steps_of(header, own) == steps


def test_adaptive_verification_is_no_count_of_the_line() -> None:
    """Adaptive is far better than k = 1, and the schedule has fixed counts only."""
    same = Interval.of(0.0, 0.01, 9, 5)
    times: dict[int | None, Interval] = {None: same, 1: same, ADAPTIVE: replace(same, value=-1.0)}
    tokens = SpanTokens({k: Interval.of(log(1.5), 0.0, 9, 5) for k in (1, ADAPTIVE)})
    found: Worth = worth_at([AtSize(4, 4, times, tokens)], [1, ADAPTIVE], 3)
    assert found.best == {4: 1}
    fixed, adaptive = found.rates
    assert (adaptive.drafts, adaptive.count, fixed.count) == (1, ADAPTIVE, 1)
    assert adaptive.ratio.value == pytest.approx(1.5 * exp(1))
    alone = worth_at([AtSize(4, 4, times, tokens)], [ADAPTIVE], 3)  # of a run that was cut off
    assert (alone.best, [rate.drafts for rate in alone.rates]) == ({}, [0])


def test_adaptive_verification_has_the_tokens_of_its_own_batch_size() -> None:
    """At 3 requests it verifies almost nothing, at 6 all; there it learns in the first of three
    blocks. Its rate is that of the measured times per token, 1 over 1.25 x 1.8 / tokens each."""
    sizes = {3: [4, 4, 4], 6: [5, 80, 80]}
    runs = []
    for requests, accepted in sizes.items():
        run = run_of({count: [step] * 3 for count, step in STEP.items()}, requests=requests)
        own = [batch for batch in run.batches if batch.cell.drafts == ADAPTIVE]
        for each, number in zip(own, accepted, strict=True):
            each.request_tokens = ((101 + number, number),) * 3
        runs.append(Measured(run, ()))
    found = worth_of(runs)
    rates = [rate for rate in found.rates if rate.adaptive]
    assert [rate.tokens for rate in rates] == pytest.approx([1.04, 1 + 165 / 300])
    assert [rate.ratio.value for rate in rates] == pytest.approx([1.8 / 1.25] * 2)
    assert [rate.time_ratio for rate in rates] == pytest.approx(
        [1.04 * 1.25 / 1.8, 1.55 * 1.25 / 1.8]
    )
    assert [rate.tokens for rate in found.rates if rate.count == 1] == pytest.approx([1.6] * 2)
    for batch in runs[0].run.batches:  # it broke parity in the gate: no timed block has it
        if batch.cell.drafts == ADAPTIVE:
            batch.phase = Phase.GATE
    (rate,) = (rate for rate in worth_of(runs[:1]).rates if rate.adaptive)
    assert (rate.tokens, rate.time_ratio, rate.ratio, rate.groups) == (None, None, None, 0)


@pytest.mark.parametrize("count", [1, ADAPTIVE])
def test_a_slower_count_is_a_change_against_an_earlier_run(count: int) -> None:
    """A step takes a tenth longer. Of adaptive verification that is the change whatever was
    accepted; texts add no error of their own."""
    base, new = (
        Measured(run_of({0: [1.0, 1.2, 1.1], count: [s, 1.2 * s, 1.1 * s]}), ())
        for s in (1.2, 1.32)
    )
    for batch in new.run.batches:
        if batch.cell.drafts == ADAPTIVE:
            batch.request_tokens = ((104, 3), (141, 40), (191, 90))
    change = token_time_change(base, new, cell(count))
    assert change is not None
    found = change.ratio
    assert (found.low, found.value, found.high) == pytest.approx((1.1, 1.1, 1.1))
