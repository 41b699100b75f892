"""Several methods in one run: the best at a batch size, on records whose truth is known."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nwor_bench.analysis.draft_tokens import named_rates
from nwor_bench.analysis.worth import CountArm, Measured, times_of, worth_of
from nwor_bench.records.cell import (
    AA,
    Arm,
    Cell,
    Count,
    Drafts,
    MethodCount,
    NworMode,
    ScvMode,
    method_of,
)
from nwor_bench.records.header import PairFacts, StoredSpec
from nwor_bench.records.types import Phase, RequestTimes, Verdict
from nwor_bench.report.worth import worth_result
from nwor_bench.report.worth_answer import line_blocks, method_lines, worth_sentence

EAGLE, NGRAM = "eagle", "ngram"

ACCEPTED: dict[Count | None, int] = {
    MethodCount(EAGLE, 1): 60, MethodCount(EAGLE, 2): 90, MethodCount(NGRAM, 2): 90,
}  # fmt: skip
"""Accepted drafts of 100 windows; plain decoding and k = 0 accept none."""

STEP: dict[Count | None, float] = {
    0: 1.0, None: 1.0, MethodCount(EAGLE, 0): 1.07, MethodCount(EAGLE, 1): 1.2,
    MethodCount(EAGLE, 2): 1.3, MethodCount(NGRAM, 0): 1.0, MethodCount(NGRAM, 2): 1.3 * 1.02,
}  # fmt: skip
"""Time of a step; ngram with two drafts gives as many tokens as eagle and takes 2 % longer."""


def batch(count: Count | None, block: int, step: float) -> Any:
    windows, accepted = 100, ACCEPTED.get(count, 0)
    tpot = tuple(10 * step / (1 + accepted / windows) * part for part in (0.9, 1.0, 1.1))
    arm: Arm = AA if count is None else Drafts(count)
    return SimpleNamespace(
        cell=Cell("tiny", NworMode.OFF, ScvMode.OFF, arm), phase=Phase.TIMED, block=block,
        requests=3, output_tokens=3 * 161, request_times=RequestTimes((), tpot),
        token_digests=tuple(f"{block}-{n}" for n in range(3)),
        request_acceptance=((windows, accepted),) * 3,
        request_tokens=((1 + windows + accepted, accepted),) * 3,
    )  # fmt: skip


def run_of(requests: int = 3, noise: float = 0.002, blocks: int = 8, **change: Any) -> Any:
    """Blocks of plain decoding and both methods; `change`: arms of the configuration."""
    rng = np.random.default_rng(requests)
    batches = [
        batch(count, block, step * float(np.exp(rng.normal(0, noise))))
        for count, step in STEP.items()
        for block in range(1, blocks + 1)
    ]
    arms = {EAGLE: {"method": "eagle"}, NGRAM: {"method": "ngram"}, **change}
    header = SimpleNamespace(
        spec=StoredSpec(engines=True, arms=arms), scenario={"requests": requests},
        pair=PairFacts(arms={EAGLE: PairFacts(method="eagle", draft="head"),
                             NGRAM: PairFacts(method="ngram")}), blocks=None,
    )  # fmt: skip
    finished = frozenset((Phase.TIMED, number) for number in range(1, blocks + 1))
    return SimpleNamespace(batches=batches, header=header, finished=finished, windows=())


def in_groups(noise: float = 0.002, slower: float = 1.2) -> list[Measured]:
    """The methods in a group each; the second ran when the machine was slower."""
    runs = []
    for name, pace, scatter in ((EAGLE, 1.0, noise), (NGRAM, slower, 1.5 * noise)):
        run = run_of(noise=scatter)
        run.header.spec = run.header.spec.model_copy(update={"engines_at_once": name})
        run.batches = [b for b in run.batches if method_of(b.cell.drafts) in (None, name)]
        for each in run.batches:
            each.request_times = RequestTimes(
                (), tuple(pace * t for t in each.request_times.tpot_ms)
            )
        runs.append(Measured(run, ()))
    return runs


def test_groups_of_engines_are_compared_through_their_own_plain_decoding() -> None:
    """20 % that the machine was slower for the second group are in no ratio."""
    worth = worth_of(in_groups())
    other, over, verdict = worth.next_best[3]
    assert (worth.best[3], other) == (MethodCount(EAGLE, 2), MethodCount(NGRAM, 2))
    assert over.value == pytest.approx(1.02, abs=0.005)
    assert verdict == Verdict.FASTER
    ratios = {rate.count: rate.ratio for rate in worth.rates}
    for count in (MethodCount(EAGLE, 2), MethodCount(NGRAM, 2)):
        assert ratios[count].holds(1.9 / STEP[count])
        assert ratios[count].half_width < 0.02
    assert worth.texts == 24  # all methods ran the same prompts


def test_few_blocks_leave_the_best_open() -> None:
    """Plain decoding was the best of three blocks in which each method took half of its time."""
    few, enough = Measured(run_of(3, blocks=3), ()), Measured(run_of(5), ())
    worth = worth_of([few, enough])
    assert {rate.verdict for rate in worth.rates if rate.requests == 3} == {Verdict.AMBIGUOUS}
    assert worth.best == {5: MethodCount(EAGLE, 2)}
    assert (worth.next_best.keys(), worth.best_fixed) == ({5}, MethodCount(EAGLE, 2))
    told = worth_sentence(worth)
    assert dict(told.facts)["undecided"].endswith(
        "so far, with eagle k=2 (3 blocks, a verdict needs 5)"
    )
    only = worth_of([few])
    assert (only.best, only.next_best, worth_sentence(only).badge) == ({}, {}, Verdict.AMBIGUOUS)
    few.run.header.engine = None
    measured: Any = SimpleNamespace(worth=only, header=few.run.header, times=(), staged={})
    found = worth_result(measured)
    assert [found[n] for n in ("best", "best_method", "next_best")] == [{}] * 3
    assert found["speculative_config"] == []
    assert [*line_blocks(only, few.run.header.pair)] == []


def test_a_group_of_few_blocks_that_is_ahead_leaves_the_best_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step, best in ((0.8, {}), (1.6, {3: MethodCount(EAGLE, 2)})):
        monkeypatch.setitem(STEP, MethodCount(NGRAM, 2), step)
        first, second = in_groups()
        second.run.batches = [b for b in second.run.batches if b.block <= 3]
        assert worth_of([first, second]).best == best


def test_two_groups_know_less_of_each_other_than_two_methods_of_one() -> None:
    """The noise of both: each engine was beside another one without a drafter."""
    runs = in_groups(0.02)
    floors = [times_of(data)[CountArm(MethodCount(m, 2))].offset
              for data, m in zip(runs, (EAGLE, NGRAM), strict=True)]  # fmt: skip
    joined = worth_of(runs)
    assert joined.noise[3] == worth_of(runs[1:]).noise[3]  # the wider one
    assert joined.next_best[3][1].offset == pytest.approx(sum(floors))
    for noise in (0.02, 0.03):
        _, within, _ = worth_of([Measured(run_of(noise=noise), ())]).next_best[3]
        assert within.offset == pytest.approx(floors[noise == 0.03])
    assert joined.next_best[3][1].half_width > within.half_width


def test_a_method_that_is_two_percent_slower_is_found() -> None:
    worth = worth_of([Measured(run_of(), ())])
    assert worth.best == {3: MethodCount(EAGLE, 2)}
    other, over, verdict = worth.next_best[3]
    assert (other, verdict) == (MethodCount(NGRAM, 2), Verdict.FASTER)
    assert over.holds(1.02)
    assert over.low > 1


def test_two_methods_within_their_noise_are_not_told_apart() -> None:
    worth = worth_of([Measured(run_of(noise=0.05), ())])
    other, _, verdict = worth.next_best[3]
    assert verdict == Verdict.AMBIGUOUS
    said = worth_sentence(worth).sentence
    assert f" with {worth.best[3]} or {other}." in said
    sure = worth_of([Measured(run_of(), ())])
    assert f" with {sure.best[3]}." in worth_sentence(sure).sentence


def test_a_loaded_method_that_drafts_nothing_is_a_row() -> None:
    worth = worth_of([Measured(run_of(), ())])
    taxes = {rate.method: rate for rate in worth.rates if rate.is_tax}
    assert taxes.keys() == {EAGLE, NGRAM}
    assert taxes[EAGLE].ratio is not None
    assert taxes[EAGLE].ratio.inverse().holds(1.07)
    assert (taxes[EAGLE].verdict, taxes[EAGLE].tokens) == (Verdict.SLOWER, 1.0)


def test_a_count_that_changed_the_output_is_never_the_best() -> None:
    broken = {CountArm(MethodCount(EAGLE, 2)): str(Verdict.INVALID)}
    runs = [Measured(run_of(3), (), broken), Measured(run_of(5), ())]
    worth = worth_of(runs)
    assert worth.best == {3: MethodCount(NGRAM, 2), 5: MethodCount(NGRAM, 2)}
    verdicts = {rate.verdict for rate in worth.rates if rate.count == MethodCount(EAGLE, 2)}
    assert verdicts == {Verdict.INVALID}


def test_a_wrong_drafter_is_told_by_its_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are off by one place: almost none is accepted, so no count of it pays."""
    for k in (1, 2):
        monkeypatch.setitem(ACCEPTED, MethodCount(EAGLE, k), 1)
    worth = worth_of([Measured(run_of(), ())])
    assert worth.best == {3: MethodCount(NGRAM, 2)}
    tokens = [r.tokens for r in worth.rates if r.method == EAGLE]
    assert tokens == pytest.approx([1, 1.01, 1.01])
    assert {r.verdict for r in worth.rates if r.method == EAGLE} == {Verdict.SLOWER}


def test_the_line_is_the_best_methods_and_of_its_own_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of()
    ((sizes, line),) = method_lines(worth_of([Measured(run, ())]), run.header.pair)
    assert sizes == [3]
    assert line == {"method": "eagle", "model": "head", "num_speculative_tokens": 2}
    monkeypatch.setitem(STEP, MethodCount(EAGLE, 2), 3.0)
    monkeypatch.setitem(STEP, MethodCount(EAGLE, 1), 1.7)
    ((_, line),) = method_lines(worth_of([Measured(run_of(), ())]), run.header.pair)
    assert line == {"method": "ngram", "num_speculative_tokens": 2}


def test_synthetic_acceptance_is_each_methods_own() -> None:
    key = "synthetic_acceptance_rates"
    run = run_of(eagle={"method": "eagle", key: [0.5, 0.25]})
    assert named_rates(run) == {EAGLE: [0.5, 0.25]}
    tokens = {rate.count: rate.tokens for rate in worth_of([Measured(run, ())]).rates}
    assert tokens[MethodCount(EAGLE, 2)] == pytest.approx(1.75)
    assert tokens[MethodCount(NGRAM, 2)] == pytest.approx(1.9)


def test_json_names_the_method_and_its_line() -> None:
    run = run_of()
    run.header.engine = None
    measured: Any = SimpleNamespace(
        worth=worth_of([Measured(run, ())]), header=run.header, times=(), staged={}
    )
    found = worth_result(measured)
    assert (found["best"], found["best_method"]) == ({"3": 2}, {"3": "eagle"})
    assert found["next_best"]["3"]["count"] == "ngram k=2"
    (line,) = found["speculative_config"]
    assert line == {"requests": [3], "method": "eagle", "model": "head",
                    "num_speculative_tokens": 2}  # fmt: skip


def test_a_method_that_drafts_nothing_is_no_rival_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count in ACCEPTED:
        monkeypatch.setitem(STEP, count, 3.0)
    worth = worth_of([Measured(run_of(), ())])
    assert worth.best == {3: 0}
    assert worth.next_best[3][0] in (MethodCount(EAGLE, 2), MethodCount(NGRAM, 2))
    assert worth_sentence(worth).badge == Verdict.SLOWER
