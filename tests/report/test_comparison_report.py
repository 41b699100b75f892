"""A comparison as people and programs read it."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
from changed_run import other_prompts, slowed, stored
from rich.console import Console
from synthetic_run import change_windows, kept, make_run, with_header

from nwor_bench.analysis.compare import DecideBy, compare_runs
from nwor_bench.report.comparison import (
    ONE,
    change_text,
    comparison_document,
    comparison_json,
    headline,
    headline_of_all,
    how_decided,
    notes,
    reasons,
)
from nwor_bench.report.terminal import print_document

pytestmark = pytest.mark.slow  # whole runs

RUN = make_run(blocks=12, device="cuda", aa=True)
BASE = stored(RUN)
WORSE = slowed(RUN, {("stage", "graph"): 1.05}, machine=1.2)


def compare(new, **options):
    return compare_runs(BASE, stored(new), **options)


def shown(comparison, width: int) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_document(console, comparison_document({ONE: comparison}))
    return capture.get()


def big(comparison):
    """The comparison with the largest numbers that a long sweep would give."""
    values = {"window_ms_mean": 123.45, "tokens_per_s": 98765.4, "acceptance_rate": 1.0}
    cells = [
        replace(c, base=replace(c.base, **values), new=replace(c.new, **values, parity="INVALID"))
        for c in comparison.cells
    ]
    return replace(comparison, cells=tuple(cells))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("change", [lambda c: c, big], ids=["usual", "big"])
def test_the_terminal_shows_every_number_in_80_columns(width: int, change) -> None:
    comparison = change(compare(WORSE))
    text = shown(comparison, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for cell in comparison.cells:
        tables = text.splitlines()
        rows = [line for line in tables if re.match(rf"{re.escape(cell.label)}  +[^( ]", line)]
        if cell.outcome == "NOT COMPARED":
            rows.insert(0, "")
        else:
            assert str(cell.outcome) in rows[0]
            assert change_text(cell.time) in rows[0]
        assert f"{cell.base.window_ms_mean:.2f} → {cell.new.window_ms_mean:.2f}" in rows[1]
        rates = [side.tokens_per_s for side in (cell.base, cell.new)]
        digits = 0 if min(rates) > 1000 else 1
        assert " → ".join(f"{rate:,.{digits}f}" for rate in rates) in rows[1]
    assert " ".join(headline(comparison).split()) in " ".join(text.split())


@cache
def noisy():
    return compare(slowed(RUN, {}, noise=0.2))


ALONE = kept(RUN, lambda record: record.scv_mode == record.nwor_mode == "off")
CHECKED = with_header(make_run(blocks=0, device="cuda", aa=True), "scenario", batches=0)
BARELY = slowed(RUN, {("stage", "graph"): 1.006}, noise=0.006)


@pytest.mark.parametrize(
    ("made", "badge", "words"),
    [
        (lambda: compare(RUN), "SAME", "No regression: "),
        (noisy, "AMBIGUOUS", "Inconclusive, A/A changed by more than --threshold: "),
        (lambda: replace(compare(RUN, threshold=1e-6), noise_floor=1e-5), "AMBIGUOUS",
         "Inconclusive, "),
        (lambda: compare(BARELY), "AMBIGUOUS",
         "No regression was shown, and none can be ruled out: "),
        (lambda: compare_runs(stored(ALONE), stored(ALONE)), "NOT COMPARED",
         "Not comparable, no cell's change has an interval: "),
        (lambda: compare_runs(stored(CHECKED), stored(CHECKED)), "NOT COMPARED",
         "Not comparable, nothing was timed in BASE and NEW: "),
        (lambda: compare(CHECKED), "NOT COMPARED",
         "Not comparable, nothing was timed in N"),
    ],
)  # fmt: skip
def test_the_headline_says_which_way_and_how_sure(made, badge: str, words: str) -> None:
    comparison = made()
    assert headline(comparison).startswith(words)
    assert comparison_document({ONE: comparison}).lead[0].badge == badge
    first = words.split(": ")[0]
    assert headline_of_all({"a": comparison, "b": comparison}).startswith(first)


def test_the_output_says_which_number_decides() -> None:
    assert "The time decides" in how_decided(compare(WORSE, decide_by=DecideBy.TIME))
    assert "above 5 % (--threshold)" in how_decided(compare(WORSE, threshold=0.05))
    floor = f"above {100 * noisy().noise_floor:.3g} %, the noise floor"
    assert floor in how_decided(noisy())
    (unsure,) = [line for line in reasons(noisy()) if "contains 1" in line]
    assert "stage x off, stage x graph and stage x adaptive" in unsure


CPU = with_header(RUN, "engine", device="cpu")


@pytest.mark.parametrize(
    ("new", "words", "absent"),
    [
        (WORSE, ("12 blocks of the same prompts", "one start of one process",
                 "Machine: off x off took 1.2"), "not paired"),
        (slowed(RUN, {}, seed=3), ("times as long as in BASE",), "whole batches"),
        (other_prompts(WORSE), ("not paired",), "same prompts"),
        (change_windows(WORSE, lambda w: True, wall_ms=None), ("whole batches",), "not paired"),
        (CPU, ("measure the harness", "device: BASE cuda, NEW cpu"), "not paired"),
        (with_header(RUN, "spec", seed=8), ("seed: BASE 3, NEW 8",), "measure the harness"),
    ],
)  # fmt: skip
def test_notes_say_what_weakens_the_numbers(new, words: tuple[str, ...], absent: str) -> None:
    cut = replace(BASE, warnings=("it did not end as planned (status: partial)",))
    told = " ".join(notes(compare_runs(cut, stored(new), force=True)))
    for each in (*words, "BASE: it did not end as planned (status: partial)."):
        assert each in told
    assert absent not in told


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


def test_a_change_without_an_interval_has_null_bounds() -> None:
    """Other bytes of --json and --markdown are golden files."""
    few = stored(make_run(blocks=2))
    cells = json.loads(comparison_json(compare_runs(few, few), strict=True))["cells"]
    change = cells[0]["time_change"]
    assert (change["ratio"], change["low"], change["high"], change["p_value"]) == (1, *[None] * 3)


def test_two_pairs_are_told_apart() -> None:
    def both(run):
        other = tuple(replace(b, pair="other") for b in run.batches)
        windows = tuple(replace(w, pair="other") for w in run.windows)
        return replace(run, batches=run.batches + other, windows=run.windows + windows)

    comparison = compare_runs(stored(both(RUN)), stored(both(WORSE)))
    assert len(comparison.cells) == 14
    assert "other: stage x graph +5.04 % time (95 %: 4.94 to 5.14), the worst of 2" in headline(
        comparison
    )
    assert max(len(line.rstrip()) for line in shown(comparison, 80).splitlines()) <= 80
