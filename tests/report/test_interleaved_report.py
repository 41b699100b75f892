"""The report of interleaved windows: ratios, left-out groups, the split."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from interleaved_run import STAGE_GRAPH, Planted, interleaved_run
from report_runs import gpu_run
from synthetic_run import analysed, summarised

from nwor_bench.records.cell import SHAM, SWITCHED
from nwor_bench.records.store import RunData
from nwor_bench.report.document import Block, Paragraph, Table
from nwor_bench.report.load import run_result
from nwor_bench.report.precision import IS_SHAM, NO_SHAM, interleaved_blocks, split_lines
from nwor_bench.report.questions import questions

pytestmark = pytest.mark.slow  # whole runs


EFFECTS = {"stage x graph": 0.972, "control x off": 0.985}
WHOLE = {"graph": 0.972, "control": 0.985}
CLOCKS = (1980.0, 1410.0, 1700.0)
SPLIT = re.compile(
    r"stage x graph, 2\.[789] % less: attention 1\.[456] % less \+- 0\.\d\d, "
    r"writes 1\.[234] % less \+- 0\.\d\d\."
)


@cache
def run() -> RunData:
    return interleaved_run(Planted(EFFECTS, clocks=CLOCKS), 15, whole=WHOLE)


@cache
def blocks() -> list[Block]:
    return interleaved_blocks(analysed(run()))


def tables(found: list[Block]) -> dict[str, Table]:
    return {block.headers[1]: block for block in found if isinstance(block, Table)}


def row(found: Table, name: str) -> dict[str, str]:
    values = next(values for values in found.rows if values[0] == name)
    return dict(zip(found.headers, values, strict=True))


def test_windows_stand_beside_whole_batches() -> None:
    ratios = tables(blocks())["Decided by"]
    own = row(ratios, STAGE_GRAPH.label)
    assert own["Decided by"] == "windows"
    for column in ("Windows", "Whole batches"):
        assert re.fullmatch(r"0\.97\d\d \[0\.9\d\d\d, 0\.9\d\d\d\]", own[column])
    assert (own["Groups"], own["Left out"]) == ("120", "0")
    over_control = row(ratios, "stage x graph over control x off")
    assert over_control["Windows"].startswith("0.98")
    assert over_control["Whole batches"] == "–"  # noqa: RUF001


def words(made: RunData) -> list[str]:
    found = interleaved_blocks(analysed(made))
    return [block.text for block in found if isinstance(block, Paragraph)]


def with_sham(counts: dict[str, int]) -> RunData:
    cells = {"off x off (A/A)": {"scv_counters": {}, "scv_fallbacks": {}, SHAM: counts}}
    event = {"event": "interleaved", "batch": 5000, "block": 1, "cells": cells}
    return replace(run(), events=(*run().events, event))


def test_what_the_aa_cell_switched_is_reported() -> None:
    assert NO_SHAM in words(run())  # as runs of older versions
    assert IS_SHAM in words(with_sham({SWITCHED: 40}))
    (partly,) = [t for t in words(with_sham({SWITCHED: 40, "odd": 2})) if t.startswith(IS_SHAM)]
    assert partly.endswith("switched nothing: 2 (odd).")
    (none,) = [t for t in words(with_sham({"nothing_to_switch": 7})) if t.startswith(NO_SHAM)]
    assert "7 (on this runner" in none


def test_carry_over_that_could_not_be_tested_is_reported() -> None:
    few = interleaved_run(Planted(EFFECTS), batches=3)
    found = interleaved_blocks(analysed(few))
    ratios = tables(found)["Decided by"]
    assert row(ratios, STAGE_GRAPH.label)["Carry-over"] == "could not be tested"


def test_the_split_is_an_answer() -> None:
    cells = summarised(run())
    (line,) = split_lines(analysed(run(), cells).splits)
    assert SPLIT.fullmatch(line)
    found = analysed(run(), cells)
    assert dict(questions(found).entries)["What makes the difference?"] == line
    sentence = run_result(found, Path())["answer"]["sentence"]
    assert re.search(r"; attention -1\.[456] %, writes -1\.[234] %; 95 % intervals", sentence)


def test_the_answer_counts_groups_not_blocks() -> None:
    cells = summarised(run())
    sure = dict(questions(analysed(run(), cells)).entries)["How sure is that?"]
    assert "It rests on 120 groups of neighbouring windows." in sure


def test_a_run_of_whole_batches_has_none_of_it() -> None:
    made = gpu_run()
    cells = summarised(made)
    assert interleaved_blocks(analysed(made, cells)) == []
    assert split_lines(analysed(made, cells).splits) == []
    assert "What makes the difference?" not in dict(questions(analysed(made, cells)).entries)
