"""A comparison as people and programs read it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from changed_run import other_prompts, slowed, stored
from rich.console import Console
from synthetic_run import change_batches, change_windows, kept, make_run, with_header

from nwor_bench.analysis.compare import DecideBy, compare_runs
from nwor_bench.report.comparison import (
    change_text,
    comparison_document,
    comparison_json,
    headline,
    how_decided,
    notes,
    reasons,
)
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.terminal import print_document
from nwor_bench.report.text import with_bounds

REAL = Path(__file__).parents[2] / "sweeps" / "results" / "cpu-2-cores"
RUN = make_run(blocks=12, device="cuda", aa=True)
BASE = stored(RUN)
WORSE = slowed(RUN, {("stage", "graph"): 1.05}, machine=1.2)


def is_adaptive(record) -> bool:
    return (record.nwor_mode, record.scv_mode) == ("stage", "adaptive")


def compare(new, **options):
    return compare_runs(BASE, stored(new), **options)


def shown(comparison, width: int) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_document(console, comparison_document(comparison))
    return capture.get()


def big(comparison):
    """The comparison with the largest numbers that a long sweep would give."""
    values = {"window_ms_mean": 123.45, "tokens_per_s": 98765.4, "acceptance_rate": 1.0}
    cells = [
        replace(c, base=replace(c.base, **values), new=replace(c.new, **values, parity="INVALID"))
        for c in comparison.cells
    ]
    return replace(comparison, cells=tuple(cells))


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("change", [lambda c: c, big], ids=["usual", "big"])
def test_the_terminal_shows_every_number_in_80_columns(width: int, change) -> None:
    comparison = change(compare(WORSE))
    text = shown(comparison, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for cell in comparison.cells:
        tables = text.partition("Changes\n")[2].splitlines()
        rows = [line for line in tables if re.match(rf"{re.escape(cell.label)} +[^( ]", line)]
        assert str(cell.outcome) in rows[0]
        assert change_text(cell.time) in rows[0]
        assert f"{cell.base.window_ms_mean:.2f} → {cell.new.window_ms_mean:.2f}" in rows[1]
        rates = [side.tokens_per_s for side in (cell.base, cell.new)]
        digits = 0 if min(rates) > 1000 else 1
        assert " → ".join(f"{rate:,.{digits}f}" for rate in rates) in rows[1]
    assert " ".join(headline(comparison).split()) in " ".join(text.split())


@pytest.mark.slow
def test_the_headline_says_which_way_and_how_sure() -> None:
    assert headline(compare(WORSE)).startswith("1 regression: stage x graph got worse; ")
    assert headline(compare(RUN)).startswith("No regression: ")
    noisy = compare(slowed(RUN, {}, noise=0.2))
    changed = f"the A/A arm changed by {100 * noisy.noise_floor:.3g} %, more than --threshold (1 %)"
    assert headline(noisy).startswith(f"Inconclusive: by chance alone {changed}: ")
    barely = compare(RUN, threshold=1e-6)  # every cell is SAME
    document = comparison_document(replace(barely, noise_floor=1e-5))
    assert document.lead[0].badge == "AMBIGUOUS"
    unsure = headline(compare(slowed(RUN, {("stage", "graph"): 1.006}, noise=0.006)))
    assert unsure.startswith("No regression was shown, and none can be ruled out: ")
    alone = stored(kept(RUN, lambda record: record.scv_mode == record.nwor_mode == "off"))
    none = "Not comparable, no cell's change has an interval: "
    assert headline(compare_runs(alone, alone)).startswith(none)
    checked = stored(with_header(make_run(blocks=0, device="cuda", aa=True), "scenario", batches=0))
    untimed = compare_runs(checked, checked)
    assert headline(untimed).startswith("Not comparable, nothing was timed in BASE and NEW: ")
    assert comparison_document(untimed).lead[0].badge == "NOT COMPARED"
    assert headline(compare_runs(BASE, checked)).startswith(
        "Not comparable, nothing was timed in N"
    )


@pytest.mark.slow
def test_the_output_says_which_number_decides() -> None:
    assert "ratio to off x off decides" in how_decided(compare(WORSE))
    assert "The time decides" in how_decided(compare(WORSE, decide_by=DecideBy.TIME))
    assert "above 1 % (--threshold)" in how_decided(compare(WORSE))
    assert "above 5 % (--threshold)" in how_decided(compare(WORSE, threshold=0.05))
    loud = slowed(RUN, {}, noise=0.1)
    floor = compare(loud).noise_floor
    assert floor > 0.01
    assert f"above {100 * floor:.3g} %, the noise floor" in how_decided(compare(loud))


@pytest.mark.slow  # many comparisons
def test_notes_tell_what_weakens_the_numbers() -> None:
    def told(new, base=BASE, **options) -> str:
        return " ".join(notes(compare_runs(base, stored(new), **options)))

    assert "12 blocks of the same prompts" in told(WORSE)
    assert "times as long as in BASE, more than the blocks' noise" in told(WORSE)
    assert "within the blocks' noise" in told(slowed(RUN, {}, seed=3))
    assert "not paired" in told(other_prompts(WORSE))
    assert "not paired" not in told(WORSE)
    assert "whole batches" in told(change_windows(WORSE, lambda w: True, wall_ms=None))
    assert "another start" not in told(WORSE)
    assert "one start of one process" in told(WORSE)
    assert "measure the harness" in told(with_header(RUN, "engine", device="cpu"), force=True)
    assert "device: BASE cuda, NEW cpu" in told(
        with_header(RUN, "engine", device="cpu"), force=True
    )
    assert "seed: BASE 3, NEW 8" in told(with_header(RUN, "spec", seed=8))
    cut = replace(BASE, warnings=("it did not end as planned (status: partial)",))
    assert "BASE: it did not end as planned (status: partial)." in told(RUN, cut)


@pytest.mark.slow
def test_other_acceptance_on_the_same_prompts_is_reported() -> None:
    def accepting_less(run):
        new = stored(run)
        key = next(cell for cell in new.cells if cell.label == "stage x adaptive")
        return replace(new, cells={**new.cells, key: replace(new.cells[key], acceptance_rate=0.01)})

    found = notes(compare_runs(BASE, accepting_less(WORSE)))
    assert any(
        "Acceptance changed on the same prompts: stage x adaptive." in note for note in found
    )
    for new in (accepting_less(other_prompts(WORSE)), stored(WORSE)):
        assert not any("Acceptance changed" in note for note in notes(compare_runs(BASE, new)))


@pytest.mark.slow
def test_reasons_name_the_cells_that_share_them() -> None:
    broken = change_batches(RUN, is_adaptive, parity="INVALID", first_mismatch="token 3")
    found = reasons(compare(broken))
    assert any(
        line.startswith("REGRESSION: stage x adaptive: INVALID in NEW: ") and "token 3" in line
        for line in found
    )
    noisy = [line for line in reasons(compare(slowed(RUN, {}, noise=0.2))) if "contains 1" in line]
    assert len(noisy) == 1
    assert "stage x off, stage x graph and stage x adaptive" in noisy[0]


def test_markdown_puts_the_verdict_first_and_every_cell_in_both_tables() -> None:
    comparison = compare(WORSE)
    text = render_markdown(comparison_document(comparison))
    assert text.splitlines()[2] == f"**REGRESSION: {headline(comparison)}**"
    for cell in comparison.cells:
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert [line.split("|")[1].strip() for line in rows].count(cell.label) == 2
    cell = next(c for c in comparison.cells if c.label == "stage x graph")
    row = next(line for line in text.splitlines() if "| REGRESSION " in line)
    change = cell.ratio.interval
    assert with_bounds(cell.ratio.ratio, change.low, change.high) in row
    assert f"{cell.base.window_ms_mean:.2f} → {cell.new.window_ms_mean:.2f}" in text
    assert "git 0123abc" in text


def test_json_holds_the_whole_comparison() -> None:
    few = compare_runs(stored(make_run(blocks=2)), stored(make_run(blocks=2)))
    for comparison in (compare(WORSE), few):
        content = json.loads(comparison_json(comparison, strict=True))
        assert content["comparison_version"] == 1
        assert content["exit_code"] == comparison.exit_code(strict=True)
        assert len(content["cells"]) == len(comparison.cells)
        for written, cell in zip(content["cells"], comparison.cells, strict=True):
            assert written["outcome"] == cell.outcome
            assert written["p_value_holm"] == cell.p_value_holm
            for name, change in (("ratio_change", cell.ratio), ("time_change", cell.time)):
                if change is None:
                    assert written[name] is None
                    continue
                interval = change.interval
                assert written[name]["ratio"] == change.ratio
                assert written[name]["low"] == (interval and interval.low)
                assert written[name]["paired"] is change.paired
    assert few.cells[0].time.interval is None


@pytest.mark.slow
def test_two_pairs_are_told_apart() -> None:
    def both(run):
        other = tuple(replace(b, pair="other") for b in run.batches)
        windows = tuple(replace(w, pair="other") for w in run.windows)
        return replace(run, batches=run.batches + other, windows=run.windows + windows)

    comparison = compare_runs(stored(both(RUN)), stored(both(WORSE)))
    assert len(comparison.cells) == 14
    assert "other: stage x graph and toy: stage x graph got worse" in headline(comparison)
    text = shown(comparison, 80)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
