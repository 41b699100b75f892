"""Draft counts that failed their checks have no time, no ratio and no line anywhere."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import make_run, save_run, with_header, with_parts

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.compare import ChangeVerdict, compare_sweeps
from nwor_bench.analysis.measured_worth import MeasuredWorth, measured_worth
from nwor_bench.analysis.stored_run import load_stored
from nwor_bench.records.cell import AA, ADAPTIVE, Drafts
from nwor_bench.records.store import FINISHED_EVENT, RunData
from nwor_bench.records.types import Phase, RequestTimes
from nwor_bench.report.document import Code, Paragraph
from nwor_bench.report.text import NOT_MEASURED
from nwor_bench.report.worth import rates_table, worth_result, worth_rows
from nwor_bench.report.worth_answer import line_blocks, worth_answer

pytestmark = pytest.mark.slow  # imports scipy and pandas

BLOCKS = 6
RATES = {1: 1.8, 2: 1.5, ADAPTIVE: 1.4}
"""Tokens/s over k = 0: without its checks k = 1 would be the line."""


def counts_run(broken: Sequence[Drafts] = (), requests: int = 2) -> RunData:
    """A run with an engine for each count, whose blocks scatter by a thousandth.

    Args:
        broken: arms whose output differed in the last block.
    """
    source = make_run(blocks=BLOCKS)
    rates = {Drafts(0): 1.0, AA: 1.0} | {Drafts(k): rate for k, rate in RATES.items()}
    batches, windows = [], []
    for number, (arm, rate) in enumerate(rates.items()):
        for batch in source.batches:
            if not batch.cell.is_baseline:
                continue
            own: dict[str, Any] = {"arm": str(arm), "batch": batch.batch + 1000 * number}
            tpot = 10 / rate * (1 + 0.001 * ((batch.block + number) % 3))
            batches.append(replace(
                batch, **own, request_times=RequestTimes((), (tpot,) * 2),
                request_acceptance=((50, 0 if rate == 1 else 30),) * 2,
                request_tokens=((51, 0) if rate == 1 else (81, 30),) * 2,
                token_digests=tuple(f"{requests}-{digest}" for digest in batch.token_digests),
            ))  # fmt: skip
            windows += [replace(w, **own) for w in source.windows
                        if (w.block, w.batch) == (batch.block, batch.batch)]  # fmt: skip
    events = tuple(
        {"event": "parity_broken", "reason": "token 7 differs", "block": BLOCKS, "pair": "toy",
         "nwor_mode": "off", "scv_mode": "off", "arm": str(arm)}
        for arm in broken
    )  # fmt: skip
    events += tuple(
        {"event": FINISHED_EVENT, "phase": "timed", "block": block}
        for block in range(1, BLOCKS + 1)
    )
    run = with_parts(source, spec={"draft_counts": [0, 1, 2], "engines": True})
    run = with_header(with_header(run, "scenario", requests=requests), "pair", method="mtp")
    finished = frozenset((Phase.TIMED, block) for block in range(1, BLOCKS + 1))
    return replace(run, batches=tuple(batches), windows=tuple(windows), events=events,
                   finished=finished)  # fmt: skip


def told(*runs: RunData) -> MeasuredWorth:
    return measured_worth([analyse(run) for run in runs])


def verdicts(found: MeasuredWorth) -> dict[tuple[int, int], str]:
    return {(rate.requests, rate.count): rate.verdict for rate in found.worth.rates}


def line_of(found: MeasuredWorth) -> list[str]:
    """The line for vLLM, or that speculation is to be left out."""
    blocks = list(line_blocks(found.worth, found.header.pair))
    codes = [block.text for block in blocks if isinstance(block, Code)]
    return codes + [b.text for b in blocks if isinstance(b, Paragraph) and "leave --spec" in b.text]


def test_sound_counts_are_what_the_other_tests_break() -> None:
    found = told(counts_run())
    assert set(verdicts(found).values()) == {"FASTER"}
    assert (found.worth.best, found.worth.best_fixed) == ({2: 1}, 1)
    assert ['"num_speculative_tokens": 1' in line for line in line_of(found)] == [True]
    rows = {row["drafts"]: row for row in worth_rows(found) if not row["adaptive"]}
    for row in rows.values():
        assert (row["noise_low"], row["noise_high"]) == pytest.approx((1, 1), abs=0.01)
    result = worth_result(found)
    assert result["noise"]["2"]["low"] < result["noise"]["2"]["ratio"] < 1.01


def test_a_broken_count_is_in_no_number_and_another_one_is_the_line() -> None:
    found = told(counts_run([Drafts(1)]))
    assert verdicts(found) == {(2, 1): "INVALID", (2, 2): "FASTER", (2, ADAPTIVE): "FASTER"}
    (row,) = (row for row in rates_table(found.worth).rows if row[1] == "1")
    assert row[2:] == ("INVALID", *[NOT_MEASURED] * 3, "0")
    assert (found.worth.best, found.worth.best_fixed) == ({2: 2}, 2)
    assert ['"num_speculative_tokens": 2' in line for line in line_of(found)] == [True]
    answer = worth_answer(found)
    assert answer.badge == "INVALID"
    why = "k = 1 at 2 requests: it changed the model's output (token 7 differs)"
    assert ("why", why) in answer.facts
    assert dict(answer.facts)["others"].startswith("FASTER: 1.50 times the tokens/s")
    (broken,) = (row for row in worth_rows(found) if row["drafts"] == 1)
    assert broken["verdict"] == "INVALID"
    known = ("ratio", "low", "high", "time_ratio", "tokens", "window_ms", "target_ms")
    assert {broken[name] for name in known} == {None}
    result = worth_result(found)
    assert result["best"] == {"2": 2}
    assert result["speculative_config"]["num_speculative_tokens"] == 2


@pytest.mark.parametrize("arm", [ADAPTIVE, None])
def test_broken_adaptive_verification_and_a_broken_aa_engine(arm: int | None) -> None:
    """Without the A/A engine it is not known how far apart two engines are."""
    found = told(counts_run([AA if arm is None else Drafts(arm)]))
    if arm is None:
        assert set(verdicts(found).values()) == {"AMBIGUOUS"}
        assert (found.worth.noise, found.worth.best) == ({}, {})
        assert line_of(found) == []
        return
    (rate,) = (rate for rate in found.worth.rates if rate.adaptive)
    assert (rate.verdict, rate.ratio, rate.tokens, rate.groups) == ("INVALID", None, None, 0)
    assert "adaptive" not in dict(worth_answer(found).facts)
    assert found.worth.best == {2: 1}


@pytest.mark.parametrize("broken", [[Drafts(0)], [Drafts(1), Drafts(2), Drafts(ADAPTIVE)]])
def test_without_a_valid_count_there_is_no_line_and_the_answer_says_why(
    broken: Sequence[Drafts],
) -> None:
    """Nor without k = 0, over which every ratio is."""
    found = told(counts_run(broken))
    assert {rate.ratio for rate in found.worth.rates} == {None}
    assert (found.worth.best, found.worth.best_fixed) == ({}, None)
    assert line_of(found) == []
    answer = worth_answer(found)
    assert answer.badge == "INVALID"
    assert answer.sentence.endswith("whether speculation pays is not known.")
    assert "token 7 differs" in answer.facts[0][1]
    assert worth_result(found)["speculative_config"] is None


@pytest.mark.parametrize("order", [1, -1])
def test_a_count_that_broke_at_one_batch_size_is_invalid_at_all(order: int) -> None:
    found = told(*[counts_run([Drafts(1)], requests=4), counts_run(requests=2)][::order])
    assert verdicts(found) == {
        (size, k): "INVALID" if k == 1 else "FASTER" for size in (2, 4) for k in (1, 2, ADAPTIVE)
    }
    assert (found.worth.best, found.worth.best_fixed) == ({2: 2, 4: 2}, 2)
    assert dict(worth_answer(found).facts)["why"].startswith("k = 1 at 4 requests")
    assert {row["window_ms"] for row in worth_rows(found) if row["drafts"] == 1} == {None}


def test_compare_has_no_number_of_a_broken_count(tmp_path: Path) -> None:
    """In the run that broke it, it is a regression whatever its time was."""
    for name, broken in (("base", ()), ("new", (Drafts(1),))):
        save_run(counts_run(broken), tmp_path / name)
    base, new = (load_stored(tmp_path / name) for name in ("base", "new"))
    (compared,) = compare_sweeps({"2": base}, {"2": new}).values()
    changes = {each.cell.arm: each for each in compared.cells}
    one = changes[Drafts(1)]
    assert (one.outcome, one.ratio) == (ChangeVerdict.REGRESSION, None)
    assert changes[Drafts(2)].ratio is not None
