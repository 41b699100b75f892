"""The report of interleaved windows: ratios, left-out groups, the split."""

import re
from functools import cache
from pathlib import Path

import pytest
from interleaved_run import STAGE_GRAPH
from report_runs import gpu_run
from said import split_run as run
from synthetic_run import analysed, summarised

from nwor_bench.report.document import Block, Table
from nwor_bench.report.load import run_result
from nwor_bench.report.precision import interleaved_blocks, split_lines
from nwor_bench.report.questions import questions

pytestmark = pytest.mark.slow  # whole runs


SPLIT = re.compile(
    r"stage x graph, 2\.[789] % less: attention 1\.[456] % less \+- 0\.\d\d, "
    r"writes 1\.[234] % less \+- 0\.\d\d\."
)


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


def test_the_split_is_an_answer() -> None:
    cells = summarised(run())
    (line,) = split_lines(analysed(run(), cells).splits)
    assert SPLIT.fullmatch(line)
    found = analysed(run(), cells)
    assert dict(questions(found).entries)["What makes the difference?"] == line
    sentence = run_result(found, Path())["answer"]["sentence"]
    assert re.search(r"; attention -1\.[456] %, writes -1\.[234] %; 95 % intervals", sentence)


def test_a_run_of_whole_batches_has_none_of_it() -> None:
    made = gpu_run()
    cells = summarised(made)
    assert interleaved_blocks(analysed(made, cells)) == []
    assert split_lines(analysed(made, cells).splits) == []
    assert "What makes the difference?" not in dict(questions(analysed(made, cells)).entries)
