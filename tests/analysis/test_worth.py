"""Tokens per second of draft counts: intervals on simulated runs whose truth is known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from same_places import same_places

from nwor_bench.analysis.groups import Pair
from nwor_bench.analysis.worth import Measured, refused_arms, worth_of
from nwor_bench.records.cell import AA, Arm, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.header import PairFacts, StoredSpec
from nwor_bench.records.types import Phase, Verdict

TIMES = {1: 1.2, 2: 1.4}
"""Time of a window over that at k = 0."""


def cell(arm: Arm) -> Cell:
    return Cell("tiny", NworMode.OFF, ScvMode.OFF, arm)


def measured(
    rng: np.random.Generator,
    *,
    requests: int = 4,
    texts: int = 12,
    groups: int = 12,
    noise: float = 0.05,
    times: Mapping[int, float] = TIMES,
    first_text: int = 0,
    rates: Sequence[float] | None = None,
    staged: Mapping[int, float] | None = None,
) -> Measured:
    """A run whose requests accept each draft with a probability of their own, and whose groups
    scatter around the times; those of `staged` counts around theirs over mode off."""
    batches: list[Any] = []
    digests = tuple(str(first_text + number) for number in range(texts))
    ease = rng.beta(6, 3, texts)  # its mean is 2/3
    accepted = {k: [accepted_of(rng, p, k) for p in ease] for k in times}
    for k in (0, *times):
        batches.append(SimpleNamespace(
            cell=cell(Drafts(k)), phase=Phase.GATE, block=0, token_digests=digests,
            request_acceptance=tuple(accepted[k]) if k else ((0, 0),) * texts,
            request_tokens=(), requests=texts, output_tokens=201 * texts,
        ))  # fmt: skip
    effects = [
        SimpleNamespace(
            pair=Pair(cell(Drafts(0)), cell(arm)), clock="wall_ms",
            groups=[SimpleNamespace(num_reqs=requests, host=value, device=None)
                    for value in rng.normal(log(time), noise, groups)],
        )
        for arm, time in [*((Drafts(k), t) for k, t in times.items()), (AA, 1.0)]
    ]  # fmt: skip
    for k, time in (staged or {}).items():
        twin = cell(Drafts(k))
        treated = replace(twin, nwor_mode=NworMode.STAGE, scv_mode=ScvMode.ADAPTIVE)
        own = [SimpleNamespace(num_reqs=requests, host=value, device=None)
               for value in rng.normal(log(time), noise, groups)]  # fmt: skip
        effects.append(SimpleNamespace(pair=Pair(twin, treated), clock="wall_ms", groups=own))
    speculation = None if rates is None else {"synthetic_acceptance_rates": rates}
    spec, scenario = StoredSpec(speculative_config=speculation), {"requests": requests}
    header = SimpleNamespace(scenario=scenario, spec=spec, pair=PairFacts(), blocks=None)
    run: Any = SimpleNamespace(batches=batches, header=header)
    return Measured(run, effects)  # type: ignore[arg-type]


def accepted_of(rng: np.random.Generator, ease: float, k: int) -> tuple[int, int]:
    """Windows that 200 tokens take, and the drafts accepted in them."""
    windows = accepted = 0
    while windows + accepted < 200:
        misses = np.flatnonzero(rng.random(k) > ease)
        windows, accepted = windows + 1, accepted + int(misses[0] if len(misses) else k)
    return windows, accepted


def true_tokens(k: int) -> float:
    """Tokens of a window over all texts: 1 / the mean of the windows that a token takes."""
    ease = np.random.default_rng(1).beta(6, 3, 200_000)
    each = sum(ease**place for place in range(k + 1))
    return float(1 / np.mean(1 / each))


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "noise"), [(12, 0.08), (3, 0.2)])
def test_intervals_include_the_truth_in_95_percent_of_runs(groups: int, noise: float) -> None:
    """Both counts of a run together, since an interval holds for all of them. The error of tokens
    is some 4 %, that of times noise / sqrt(groups): here about the same, and the larger.
    """
    truth = {k: true_tokens(k) / time for k, time in TIMES.items()}
    runs, hits = 60, 0
    for seed in range(runs):
        own = measured(np.random.default_rng(seed), groups=groups, noise=noise)
        rates = worth_of([own]).rates
        hits += all(r.ratio.low < truth[r.drafts] < r.ratio.high for r in rates)
    assert 0.9 < hits / runs < 0.995


@pytest.mark.slow
def test_a_count_that_scatters_five_times_as_much_is_covered_too() -> None:
    """With one scatter of all counts its interval was too narrow, those of the others too wide."""
    runs, hits = 60, 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        own = measured(rng, groups=5, noise=0.02, rates=[0.8, 0.5])
        for effect in own.effects:
            if effect.pair.treated.drafts == 2:
                for group in effect.groups:
                    group.host = rng.normal(log(TIMES[2]), 0.1)  # type: ignore[misc]
        truth = {1: 1.8 / TIMES[1], 2: 2.3 / TIMES[2]}
        rates = worth_of([own]).rates
        hits += all(r.ratio.low < truth[r.drafts] < r.ratio.high for r in rates)
    assert 0.9 < hits / runs < 0.995


def test_a_larger_count_is_chosen_only_if_its_interval_shows_it() -> None:
    rng = np.random.default_rng(0)
    sure = worth_of([measured(rng, texts=40, groups=40, noise=0.02)])
    assert sure.best == {4: 2}
    assert [rate.verdict for rate in sure.rates] == [Verdict.FASTER] * 2
    for groups, best in ((40, {4: 0}), (4, {})):  # in fewer than five none can be the best
        unsure = worth_of([measured(rng, groups=groups, noise=0.6)])
        assert {rate.verdict for rate in unsure.rates} == {str(Verdict.AMBIGUOUS)}
        assert unsure.best == best
    slow = worth_of([measured(rng, texts=40, groups=40, times={1: 2.5, 2: 4.0})])
    assert slow.best == {4: 0}
    assert [rate.verdict for rate in slow.rates] == [Verdict.SLOWER] * 2
    # k = 2 is far better than k = 0 and no better than k = 1.
    equal = {1: 1.2, 2: 1.2 * true_tokens(2) / true_tokens(1)}
    found = worth_of([measured(np.random.default_rng(3), texts=40, groups=40, times=equal)])
    assert [rate.verdict for rate in found.rates] == [Verdict.FASTER] * 2
    assert found.best == {4: 1}


def test_a_batch_size_without_groups_has_no_count_of_its_own() -> None:
    """The gate took all of its time: that is no reason not to speculate there."""
    rng = np.random.default_rng(0)
    known = measured(rng, texts=40, groups=40, noise=0.02)
    run: Any = SimpleNamespace(
        batches=known.run.batches, header=SimpleNamespace(**vars(known.run.header))
    )
    run.header.scenario = {"requests": 1}
    found = worth_of([Measured(run, []), known])
    assert (found.best, found.ran) == ({4: 2}, [1, 4])
    assert found.schedule == [[1, 4, 2]]
    # Nor of the line of a server that stages: k over k = 0 was not measured.
    twin = next(e for e in measured(rng, texts=40, groups=40, staged={2: 0.9}).effects
                if e.pair.treated.stock_twin is not None)  # fmt: skip
    unknown = worth_of([Measured(run, [twin]), known])
    assert [rate.staged.count for rate in unknown.rates if rate.staged] == [40]
    assert unknown.best_staged == {}


def test_synthetic_acceptance_is_what_its_rates_say() -> None:
    """Whatever the batches accepted, and without their error."""
    own = measured(np.random.default_rng(0), texts=1, groups=200, noise=0.01, rates=[0.8, 0.5])
    for rate, tokens in zip(worth_of([own]).rates, (1.8, 2.3), strict=True):
        assert rate.tokens == pytest.approx(tokens)
        assert rate.ratio.value == pytest.approx(tokens / TIMES[rate.drafts], rel=0.005)
        assert rate.ratio.high / rate.ratio.low < 1.01


def test_batch_sizes_share_their_requests_and_each_text_counts_once() -> None:
    first = measured(np.random.default_rng(0), requests=1)
    again = measured(np.random.default_rng(0), requests=2)
    other = measured(np.random.default_rng(1), requests=4, first_text=100)
    assert worth_of([first, again]).texts == 12
    assert worth_of([first, other]).texts == 24
    assert [rate.requests for rate in worth_of([other, first]).rates] == [1, 1, 4, 4]


def test_groups_of_other_batch_sizes_and_too_few_do_not_count() -> None:
    own = measured(np.random.default_rng(0))
    for effect in own.effects:
        for group in effect.groups[2:]:
            group.num_reqs = 2  # type: ignore[misc]
    assert {(rate.ratio, rate.groups) for rate in worth_of([own]).rates} == {(None, 0)}
    for effect in own.effects:
        for group in effect.groups[2:]:
            group.num_reqs = 3  # type: ignore[misc]
    assert {rate.groups for rate in worth_of([own]).rates} == {12}


def test_a_staged_count_is_judged_beside_the_same_count_in_mode_off() -> None:
    """Staged windows take 0.9 times as long at k = 1 and 1.2 at k = 2; what k = 1 and 2 give over
    k = 0 stays what it was, and with those times k = 2 gives no more than k = 1."""
    own = measured(
        np.random.default_rng(0), texts=40, groups=40, noise=0.02, staged={1: 0.9, 2: 1.2}
    )
    found = worth_of([own])
    one, two = found.rates
    assert one.ratio.value == pytest.approx(true_tokens(1) / TIMES[1], rel=0.06)
    assert (one.stage_verdict, two.stage_verdict) == (Verdict.FASTER, Verdict.SLOWER)
    for rate, truth in ((one, 1 / 0.9), (two, 1 / 1.2)):
        assert rate.staged.low < truth < rate.staged.high
        assert rate.staged.count == 40
    assert (found.best, found.best_staged) == ({4: 2}, {4: 1})
    # Open where k = 0 over itself seems to take 10 % more.
    own = measured(np.random.default_rng(0), texts=40, groups=40, noise=0.02, staged={1: 0.95})
    assert worth_of([own]).rates[0].stage_verdict == Verdict.FASTER
    again = next(effect for effect in own.effects if effect.pair.treated.arm == AA)
    for group in again.groups:
        group.host += log(1.1)  # type: ignore[misc]
    assert worth_of([own]).rates[0].stage_verdict == Verdict.AMBIGUOUS


@pytest.mark.parametrize(
    ("refused", "known", "best", "best_staged"),
    [
        ({}, {(1, True, True), (2, True, True)}, {4: 2}, {4: 2}),
        # A staged count alone: not as a server that stages either.
        ({(2, True): "INVALID"}, {(1, True, True), (2, True, False)}, {4: 2}, {4: 1}),
        ({(2, True): "INEFFECTIVE"}, {(1, True, True), (2, True, False)}, {4: 2}, {4: 1}),
        # In mode off: what staging adds to it is over wrong output.
        ({(2, False): "INVALID"}, {(1, True, True), (2, False, False)}, {4: 1}, {4: 1}),
        # k = 0: over it nothing is known, but staged over the same count is.
        ({(0, False): "INVALID"}, {(1, False, True), (2, False, True)}, {}, {}),
        # k = 0 over itself: no verdict without its noise.
        ({(None, False): "INVALID"}, {(1, True, True), (2, True, True)}, {}, {}),
    ],
)
def test_what_failed_its_checks_has_no_ratio_and_is_no_candidate(
    refused: Mapping[Any, str],
    known: set[Any],
    best: Mapping[int, int],
    best_staged: Mapping[int, int],
) -> None:
    own = measured(
        np.random.default_rng(0), texts=40, groups=40, noise=0.01, staged={1: 1.05, 2: 0.95}
    )
    own = replace(own, refused=refused)
    found = worth_of([own])
    shown = {(r.drafts, r.ratio is not None, r.staged is not None) for r in found.rates}
    assert shown == known
    assert (found.best, found.best_staged) == (best, best_staged)
    for rate in found.rates:
        for staged, verdict in ((False, rate.verdict), (True, rate.stage_verdict)):
            if (rate.drafts, staged) in refused:
                assert verdict == refused[rate.drafts, staged]


@pytest.mark.parametrize("mode", [NworMode.OFF, NworMode.STAGE])
@pytest.mark.parametrize(
    ("verdict", "interleaved", "compared", "timed", "refused"),
    [
        (Verdict.FASTER, "windows", "wall_ms", True, None),
        (Verdict.AMBIGUOUS, "batches", None, True, None),  # too few groups: a matter of times
        (Verdict.FASTER, None, "latency_ms", True, None),  # an engine of its own, in whole batches
        (Verdict.INVALID, None, None, False, Verdict.INVALID),
        (Verdict.INEFFECTIVE, None, None, False, Verdict.INEFFECTIVE),
        (Verdict.AMBIGUOUS, None, None, True, Verdict.AMBIGUOUS),  # a check did not run
        (Verdict.AMBIGUOUS, None, None, False, Verdict.NOT_MEASURED),  # no time after the gate
    ],
)
def test_cells_that_failed_or_were_not_checked_are_refused(
    mode: NworMode,
    verdict: Verdict,
    interleaved: str | None,
    compared: str | None,
    timed: bool,
    refused: Verdict | None,
) -> None:
    result: Any = SimpleNamespace(
        cell=replace(cell(Drafts(2)), nwor_mode=mode), verdict=verdict, interleaved=interleaved,
        compared=compared, counts_from="timed" if timed else "gate",
    )  # fmt: skip
    expected = {} if refused is None else {(2, mode is NworMode.STAGE): str(refused)}
    assert refused_arms([result]) == expected
    result.cell, result.verdict = cell(Drafts(0)), "reference"
    assert refused_arms([result]) == {}


def batch(number: int, arm: Arm, windows: Sequence[tuple[int, int]], text: str = "t") -> Any:
    """A batch of one request whose windows have these drafts and accepted ones."""
    own = {"pair": "tiny", "block": 0, "batch": number}
    phase = Phase.INTERLEAVED if arm == Drafts(0) else Phase.GATE
    return SimpleNamespace(
        **own, requests=1, cell=cell(arm), phase=phase, token_digests=(text,),
        windows=[SimpleNamespace(**own, draft_tokens=k, accepted_tokens=n) for k, n in windows],
    )  # fmt: skip


def places(*batches: Any) -> tuple[int, int]:
    run: Any = SimpleNamespace(batches=batches, windows=[w for b in batches for w in b.windows])
    return same_places(run)


LONGEST = [(4, 2), (4, 0), (4, 4)]
"""Windows that begin at tokens 1, 4 and 5."""


@pytest.mark.parametrize(
    ("arm", "windows", "found"),
    [
        (Drafts(1), [(1, 1), (1, 1), (1, 1)], (2, 2)),  # at 1, 3 and 5
        (Drafts(1), [(1, 1), (1, 0), (1, 0), (1, 0)], (2, 3)),  # at 1, 3, 4 and 5, the last differs
        (Drafts(0), [(0, 0), (0, 0), (0, 0), (2, 0), (4, 4)], (2, 2)),  # at 4 and 5
        (Drafts(0), [(0, 0), (0, 0), (0, 0), (2, 1)], (0, 1)),
    ],
)
def test_windows_from_the_same_token_are_compared(
    arm: Arm, windows: Sequence[tuple[int, int]], found: tuple[int, int]
) -> None:
    assert places(batch(1, Drafts(4), LONGEST), batch(2, arm, windows)) == found
    assert places(batch(1, Drafts(4), LONGEST), batch(2, arm, windows, text="other")) == (0, 0)
