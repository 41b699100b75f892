"""Runs read back from what was kept of them: records, tables, or summaries alone."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from changed_run import save_baseline, slowed
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from synthetic_run import header_of, make_run, save_run, with_parts

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.comparing.change_estimates import ratio_change, time_change
from nwor_bench.analysis.comparing.compare import compare_runs
from nwor_bench.analysis.comparing.preconditions import blocking_differences
from nwor_bench.analysis.comparing.stored_run import load_stored
from nwor_bench.errors import StoreError
from nwor_bench.models.pairs import DEFAULT_PAIR, load_pair
from nwor_bench.records.csv_tables import read_table
from nwor_bench.records.types import (
    BatchRecord,
    Cell,
    CellResult,
    NworMode,
    ScvMode,
    WindowRecord,
    columns,
)
from nwor_bench.report.files import to_csv
from nwor_bench.workload.config import load_scenario

pytestmark = pytest.mark.slow  # whole runs


RUN = make_run(blocks=8, device="cuda", aa=True)
NEW = slowed(RUN, {("stage", "graph"): 1.05})
TABLES = ("cells.csv", "batches.csv", "windows.csv")
STAGE_GRAPH = Cell("toy", NworMode.STAGE, ScvMode.GRAPH)
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def new(tmp_path: Path) -> Path:
    save_run(NEW, tmp_path / "new")
    return tmp_path / "new"


@pytest.mark.parametrize(
    ("record_type", "records"),
    [(BatchRecord, RUN.batches), (WindowRecord, RUN.windows), (CellResult, analyse(RUN).cells)],
)
def test_tables_read_back_as_the_records(record_type: type, records, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(to_csv(record_type, list(records)))
    assert read_table(path, record_type) == list(records)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1)
finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(
    first_mismatch=st.none() | texts,
    latency_ms=finite,
    vllm_num_drafts=st.none() | st.integers(),
    vllm_accepted_per_position=st.none() | st.lists(st.integers(), min_size=1).map(tuple),
    fallbacks=st.dictionaries(texts, st.integers()),
    conditions=st.dictionaries(texts, finite),
)
def test_any_value_survives_a_table(tmp_path_factory: pytest.TempPathFactory, **values) -> None:
    path = tmp_path_factory.mktemp("table") / "batches.csv"
    batch = replace(RUN.batches[0], **values)
    path.write_text(to_csv(BatchRecord, [batch]), encoding="utf-8", newline="")
    assert read_table(path, BatchRecord) == [batch]


def test_unknown_columns_are_left_out_and_missing_ones_take_their_default(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    lines = to_csv(WindowRecord, [RUN.windows[0]]).splitlines()
    kept = columns(WindowRecord).index("arm")
    older = [",".join(line.split(",")[:kept]) for line in lines]
    path.write_text(f"{older[0]},from_the_future\n{older[1]},7\n")
    assert read_table(path, WindowRecord) == [replace(RUN.windows[0], arm=None)]


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda header, row: f"{header}\n{row},7", ":2"),
        (lambda header, row: f"{header}\n{row[: len(row) // 2]}", ":2"),
        (lambda header, row: f"{header.replace('pair', 'pear')}\n{row}", ":2: pair"),
        (lambda header, row: f"{header}\n{row}\n{row.replace(',2,', ',two,', 1)}", ":3: num_reqs"),
    ],
)
def test_a_damaged_table_is_named_with_its_row(damage, field: str, tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    header, row = to_csv(WindowRecord, [RUN.windows[0]]).splitlines()
    path.write_text(f"{damage(header, row)}\n")
    with refused(f"windows.csv{field}", StoreError):
        read_table(path, WindowRecord)


def test_tables_alone_give_what_the_records_give(new: Path, tmp_path: Path) -> None:
    save_run(RUN, tmp_path / "records")
    records = load_stored(tmp_path / "records")
    tables = load_stored(save_baseline(RUN, tmp_path / "tables", *TABLES))
    assert (records.source, tables.source) == ("records.jsonl", "batches.csv and windows.csv")
    assert tables.cells == records.cells
    assert tables.data == records.data
    after = load_stored(new)
    assert compare_runs(tables, after).cells == compare_runs(records, after).cells


def test_a_compressed_table_of_windows_is_read_too(tmp_path: Path) -> None:
    folder = save_baseline(RUN, tmp_path / "base", *TABLES)
    plain = load_stored(folder)
    table = (folder / "windows.csv").read_bytes()
    (folder / "windows.csv").unlink()
    packed = folder / "windows.csv.gz"
    packed.write_bytes(gzip.compress(table))
    found = load_stored(folder)
    assert (found.cells, found.data) == (plain.cells, plain.data)
    assert found.source == "batches.csv and windows.csv.gz"
    packed.write_bytes(gzip.compress(table)[:-9])
    with refused(packed, StoreError, cause=EOFError):
        load_stored(folder)


@pytest.mark.parametrize(
    ("table", "kept", "naming"),
    [
        # A gate batch and 8 timed ones of 8 windows in each of 7 cells.
        ("batches.csv", 1, "of the 8 timed batches of off x off"),
        ("batches.csv", 60, "of the 8 timed batches of "),
        ("windows.csv", 1, "of the 8 windows of batch 500"),
        ("windows.csv", 500, "of the 8 windows of batch "),
    ],
)
def test_a_table_that_was_cut_between_rows_is_refused(
    table: str, kept: int, naming: str, tmp_path: Path
) -> None:
    """What is left of the blocks must not pass for all of them."""
    folder = save_baseline(RUN, tmp_path / "base", *TABLES)
    path = folder / table
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:kept]))
    with refused(path, StoreError, naming=naming) as caught:
        load_stored(folder)
    found = caught.value.value
    assert found == 0 if kept == 1 else found in range(8)


def test_without_windows_whole_batches_are_compared(new: Path, tmp_path: Path) -> None:
    base = load_stored(save_baseline(RUN, tmp_path / "base", "batches.csv"))
    assert base.source == "batches.csv"
    change = ratio_change(base, load_stored(new), STAGE_GRAPH)
    assert (change.measure, change.paired) == ("latency_ms", True)
    assert change.interval.low < 1.05 < change.interval.high


def test_summaries_alone_give_times_no_interval_and_ratios_their_own(
    new: Path, tmp_path: Path
) -> None:
    base, after = load_stored(save_baseline(RUN, tmp_path / "base")), load_stored(new)
    assert (base.source, base.data) == ("cell summaries", {})
    time = time_change(base, after, STAGE_GRAPH)
    assert time.interval is None
    assert time.ratio == pytest.approx(1.05, rel=0.01)
    assert "cell summaries only" in time.why_open
    ratio = ratio_change(base, after, STAGE_GRAPH)
    assert not ratio.paired
    assert (ratio.base_blocks, ratio.new_blocks) == (8, 8)
    assert ratio.interval.low < 1.05 < ratio.interval.high


def test_summaries_without_run_jsons_cells_come_from_the_table(tmp_path: Path) -> None:
    folder = save_baseline(RUN, tmp_path / "base", "cells.csv")
    header = json.loads((folder / "run.json").read_text())
    whole = load_stored(folder).cells
    (folder / "run.json").write_text(json.dumps({**header, "cells": None}))
    assert load_stored(folder).cells == whole


def test_a_summary_of_latencies_is_held_against_latencies(new: Path, tmp_path: Path) -> None:
    # Format version 1 did not say what it compared: it was the latency.
    folder = save_baseline(RUN, tmp_path / "base")
    header = json.loads((folder / "run.json").read_text())
    header["cells"] = [{**cell, "compared": None} for cell in header["cells"]]
    (folder / "run.json").write_text(json.dumps(header))
    change = ratio_change(load_stored(folder), load_stored(new), STAGE_GRAPH)
    assert change.measure == "latency_ms"


def test_the_baseline_that_comes_with_the_project_can_be_compared() -> None:
    base = load_stored(CHECKOUT / "sweeps/results/cpu-2-cores")
    assert len(base.cells) >= 6
    assert base.baseline_of(next(iter(base.cells))) is not None  # blocks, so times have intervals
    pair = load_pair(DEFAULT_PAIR)
    today = header_of(
        {
            "scenario": load_scenario("short").model_dump(mode="json"),
            "pair": {
                "name": pair.name,
                "method": pair.method,
                "draft": pair.packaged and pair.packaged.drafter,
                "speculative": pair.speculative,
            },
        }
    )
    assert blocking_differences(base.header, today) == []  # what `make sweep` measures
    comparison = compare_runs(base, base)
    assert not comparison.forced
    assert all(cell.time.interval.low == 1 == cell.time.interval.high for cell in comparison.cells)


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    save_run(with_parts(RUN, status="partial"), tmp_path / "run")
    assert "status: partial" in load_stored(tmp_path / "run").warnings[0]
    assert load_stored(save_baseline(RUN, tmp_path / "whole")).warnings == ()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with refused("run folder", value=str(tmp_path / "nowhere"), naming="run.json"):
        load_stored(tmp_path / "nowhere")
    (tmp_path / "sweep.json").write_text("{}")
    with refused("run folder", value=str(tmp_path)) as caught:
        load_stored(tmp_path)
    assert str(caught.value) == (
        f"run folder: '{tmp_path}' is not usable; it holds a sweep of several runs; name one run "
        "in it, or two sweeps"
    )
    empty = save_baseline(replace(RUN, batches=(), windows=()), tmp_path / "empty")
    with refused("run folder", value=str(empty)):
        load_stored(empty)
    header = json.loads((empty / "run.json").read_text())
    (empty / "run.json").write_text(json.dumps({**header, "cells": [{"pair": 7}]}))
    with refused("run.json: cells.0.pair", StoreError, value=7):
        load_stored(empty)
    (empty / "run.json").write_text(json.dumps({**header, "format_version": 99}))
    with refused("run.json: format_version", StoreError, value=99):
        load_stored(empty)
