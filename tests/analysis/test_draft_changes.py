"""What compare says of a draft count: its time per token over k = 0 in two runs."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from changed_run import stored
from synthetic_run import make_run

from nwor_bench.analysis.changes import TIME_PER_TOKEN, token_time_change
from nwor_bench.analysis.compare import (
    ChangeVerdict,
    compare_sweeps,
)
from nwor_bench.analysis.groups import Pair
from nwor_bench.analysis.stored_run import StoredRun
from nwor_bench.analysis.worth import Measured
from nwor_bench.errors import ExitCode, worst_of
from nwor_bench.records.cell import AA, Arm, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.header import PairFacts, StoredSpec
from nwor_bench.records.types import Phase
from nwor_bench.report.comparison import comparison_document
from nwor_bench.report.markdown import render_markdown
from nwor_bench.stats.interval import Interval

pytestmark = pytest.mark.slow  # imports scipy


def cell(arm: Arm) -> Cell:
    return Cell("tiny", NworMode.OFF, ScvMode.OFF, arm)


ONE, AGAIN = cell(Drafts(1)), cell(AA)
STAGED = replace(ONE, nwor_mode=NworMode.STAGE)

TAKEN = {"a": (10, 5), "b": (12, 3), "c": (9, 7), "d": (11, 6)}
"""Windows and accepted drafts of each text at k = 1."""


def measured(seed: int, times: Mapping[Cell, float], taken: Mapping[str, tuple[int, int]]) -> Any:
    """A run at one request whose groups scatter by 1 % around these times."""
    rng = np.random.default_rng(seed)
    effects = [
        SimpleNamespace(
            pair=Pair(treated.stock_twin or cell(Drafts(0)), treated), clock="wall_ms",
            groups=[SimpleNamespace(num_reqs=1, host=value, device=None)
                    for value in rng.normal(log(time), 0.01, 40)],
        )
        for treated, time in times.items()
    ]  # fmt: skip
    batches = [
        SimpleNamespace(cell=cell(Drafts(k)), phase=Phase.GATE, block=0, token_digests=[*taken],
                        request_acceptance=[*(own if k else (0, 0) for own in taken.values())],
                        request_tokens=[(1 + w + a, a) for w, a in taken.values()])
        for k in (0, 1)
    ]  # fmt: skip
    header = SimpleNamespace(
        scenario={"requests": 1}, spec=StoredSpec(), pair=PairFacts(), blocks=None
    )
    return Measured(SimpleNamespace(batches=batches, header=header), effects)  # type: ignore[arg-type]


BEFORE = measured(0, {ONE: 1.2, STAGED: 1.0, AGAIN: 1.0}, TAKEN)


def interval_of(after: Any, count: Cell) -> Interval:
    """A count's change since BEFORE."""
    change = token_time_change(BEFORE, after, count)
    assert change is not None
    assert change.measure == TIME_PER_TOKEN
    return change.ratio


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_change_of_the_time_is_found(factor: float) -> None:
    after = measured(1, {ONE: 1.2 * factor, STAGED: factor, AGAIN: 1.0}, TAKEN)
    for own, truth in ((ONE, factor), (STAGED, factor), (AGAIN, 1.0)):
        found = interval_of(after, own)
        assert found.low < truth < found.high
        assert found.high / found.low < 1.02  # equal tokens add no error


def test_fewer_accepted_drafts_are_a_change_of_the_count_and_not_of_staging() -> None:
    """Windows take as long as before, but give fewer tokens."""
    fewer = {text: (windows, accepted - 2) for text, (windows, accepted) in TAKEN.items()}
    after = measured(1, {ONE: 1.2, STAGED: 1.0}, fewer)
    tokens = [1 + sum(a for _, a in own.values()) / 42 for own in (TAKEN, fewer)]
    change, staged = (interval_of(after, own) for own in (ONE, STAGED))
    assert 1 < change.low < tokens[0] / tokens[1] < change.high
    assert staged.low < 1 < staged.high


def test_other_texts_give_no_number() -> None:
    other = {f"other {text}": own for text, own in TAKEN.items()}
    after = measured(1, {ONE: 1.2, STAGED: 1.0}, other)
    assert token_time_change(BEFORE, after, ONE) is None
    assert token_time_change(BEFORE, after, STAGED) is not None
    assert token_time_change(BEFORE, measured(1, {STAGED: 1.0}, TAKEN), ONE) is None


def test_the_error_of_tokens_is_a_jackknife_over_texts() -> None:
    """Leave-one-out ratios are worked out here by hand, as sums over the other texts."""
    shifts = dict(zip(TAKEN, (0, -1, -2, 1), strict=True))
    moved = {text: (w, a + shifts[text]) for text, (w, a) in TAKEN.items()}
    found = interval_of(measured(1, {ONE: 1.2}, moved), ONE)

    def log_tokens(own: Mapping[str, tuple[int, int]], without: str) -> float:
        kept = [pair for text, pair in own.items() if text != without]
        return log(1 + sum(a for _, a in kept) / sum(w for w, _ in kept))

    left_out = [log_tokens(moved, text) - log_tokens(TAKEN, text) for text in TAKEN]
    error = (3 / 4 * sum((v - np.mean(left_out)) ** 2 for v in left_out)) ** 0.5
    times = 2**0.5 * 0.01 / 40**0.5
    assert found.error == pytest.approx((error**2 + times**2) ** 0.5, rel=0.1)


def stored_counts(own: Measured) -> StoredRun:
    """A stored run with these cells, all with the records of off x off."""
    like = stored(make_run(blocks=3, device="cuda"))
    (off,) = [each for each in like.cells if each.is_baseline]
    cells = (cell(Drafts(0)), ONE, STAGED, AGAIN)
    results = {
        each: replace(like.cells[off], pair=each.pair, arm=each.arm, nwor_mode=each.nwor_mode)
        for each in cells
    }
    data = {each: replace(like.data[off], cell=each) for each in cells}
    return replace(like, cells=results, data=data, counts=own)


@pytest.mark.parametrize(
    ("factor", "outcome", "code"),
    [
        (1.0, ChangeVerdict.SAME, ExitCode.OK),
        (1.1, ChangeVerdict.REGRESSION, ExitCode.REGRESSION),
        (0.9, ChangeVerdict.IMPROVEMENT, ExitCode.OK),
    ],
)
def test_a_slower_count_is_a_regression(
    factor: float, outcome: ChangeVerdict, code: ExitCode
) -> None:
    """Only that count, and of two folders of `worth` the run that has it decides."""
    same = stored_counts(measured(1, {ONE: 1.2, STAGED: 1.0, AGAIN: 1.0}, TAKEN))
    after = stored_counts(measured(1, {ONE: 1.2 * factor, STAGED: 1.0, AGAIN: 1.0}, TAKEN))
    base = stored_counts(BEFORE)
    found = compare_sweeps({"r1": base, "r8": base}, {"r1": same, "r8": after}, threshold=0.02)
    outcomes = {each.label: each.outcome for each in found["r8"].cells}
    assert outcomes == {
        "k = 0": ChangeVerdict.NOT_COMPARED, "k = 1": outcome,
        "k = 1, stage x off": ChangeVerdict.SAME, "off x off (A/A)": ChangeVerdict.NOT_COMPARED,
    }  # fmt: skip
    assert worst_of(each.exit_code() for each in found.values()) is code
    page = render_markdown(comparison_document(found))
    assert "Time per token over k = 0" in page
    if code is ExitCode.REGRESSION:
        assert "a regression in 1 of 2 runs" in page
        assert re.search(r"\| r8: k = 1 +\| REGRESSION", page)
