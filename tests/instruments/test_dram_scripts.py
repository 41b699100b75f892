"""What the scripts behind dram.md and partials.md compute, on figures made by hand."""

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.synthetic_run import header_of

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Import one of the scripts by name."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_each_way_to_stage_has_a_process_of_its_own(script):
    found = script("dram_table").each_in_a_process(eval, ["__import__('os').getpid()"] * 2)
    assert len({*found, os.getpid()}) == 3


def test_the_first_that_fails_ends_it(script, tmp_path):
    later = f"open({str(tmp_path / 'later')!r}, 'w')"
    with pytest.raises(ZeroDivisionError):
        script("dram_table").each_in_a_process(eval, ["1 / 0", later])
    assert not list(tmp_path.iterdir())


def test_kept_are_the_counted_batches_of_runs_that_ended(script, tmp_path):
    for name, status in (("done", "complete"), ("stopped", "partial")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"status": status}))
        (folder / "batches.csv").write_text("phase,batch\ntimed,0\ncounters,1\n")
        (folder / "windows.csv").write_text("batch,window,arm\n0,0,\n1,0,A/A\n1,1,\n")
    arguments = SimpleNamespace(runs=[tmp_path / "runs"], output=tmp_path / "kept")
    script("dram_table").keep(arguments)
    kept = sorted(p.relative_to(tmp_path / "kept") for p in (tmp_path / "kept").glob("*/*"))
    tables = [Path("done") / name for name in ("batches.csv", "run.json", "windows.csv")]
    assert kept == [*tables, Path("stopped/run.json")]
    batches, windows = (
        (tmp_path / "kept/done" / name).read_text() for name in ("batches.csv", "windows.csv")
    )
    assert batches == "phase,batch\ncounters,1\n"
    assert windows == "batch,window,arm\n1,0,A/A\n1,1,\n"


@pytest.mark.slow
def test_the_published_page_is_what_the_kept_runs_give(script, tmp_path):
    """Anybody can make it again: no number of dram.md was typed."""
    results = Path(__file__).parents[2] / "sweeps" / "results" / "h200"
    inputs = [results / name for name in ("dram-before.csv", "attention-dram.csv")]
    script("dram_report").write_report([results / "dram"], tmp_path, *inputs)
    made = (tmp_path / "dram.md").read_text(encoding="utf-8")
    published = (results / "dram.md").read_text(encoding="utf-8")
    assert made.replace(str(tmp_path), "sweeps/results/h200") == published


@pytest.mark.parametrize(
    ("name", "page"), [("attention_dram_table", "attention-dram"), ("l2_table", "l2-persistence")]
)
def test_a_page_is_what_its_rows_give(script, monkeypatch, tmp_path, name, page):
    results = Path(__file__).parents[2] / "sweeps" / "results" / "h200"
    monkeypatch.setattr("sys.argv", [name, str(results), "--output", str(tmp_path)])
    module = script(name)
    assert page == module.PAGE
    script("measured_page").write_page("", page, module.text_of)
    published = (results / f"{page}.md").read_text(encoding="utf-8")
    made = (tmp_path / f"{page}.md").read_text(encoding="utf-8")
    assert made.replace(str(results), "sweeps/results/h200") == published


def test_splits_leave_an_output_and_a_log_sum_exp_each(script):
    shape = SimpleNamespace(head_dim=128)
    split_bytes = script("dram_parts").split_bytes
    assert split_bytes(10, shape, 1) == 0
    assert split_bytes(10, shape, 3) == 3 * (10 * 128 * 4 + 10 * 4)


LOG = """torch says something else
verify_attention 8x4 bf16, context 1024: reads alone: 200.0 MB written to DRAM in a window
verify_attention 8x4 bf16, context 1024: nwor: 131.5 MB written to DRAM in a window
verify_attention 8x4 bf16, context 1024: whole_pairs: 104.0 MB written to DRAM in a window
"""


def test_a_way_leaves_what_it_writes_above_one_read_and_its_output(script):
    module = script("partial_table")
    times = pd.DataFrame(
        {
            "requests": 8, "drafts": 4, "context": 1024, "implementation": ["nwor", "whole_pairs"],
            "time_us": [20.0, 18.0], "time_over_nwor": [None, 0.9],
            "time_over_nwor_low": [None, 0.8], "time_over_nwor_high": [None, 1.0],
        }
    )  # fmt: skip
    rows = module.joined(times, module.dram_rows(LOG.splitlines()), 25_000).set_index("way")
    assert rows["left_mb"].to_dict() == {"nwor": 31.5, "whole_pairs": 4.0}
    assert rows["above_output_mb"].to_dict() == {"nwor": 30.5, "whole_pairs": 3.0}
    with pytest.raises(ValueError, match="no line"):
        module.dram_rows(["nothing of the kind"])


def attention_rows(script):
    """Two rounds of every way at 8 x 4, 64 x 8 and 1 x 1; in one of them a way was disturbed."""
    ways = script("attention_dram_table").WAYS
    rows = [
        {
            "requests": requests, "drafts": drafts, "context": 1050 if requests > 1 else 16,
            "way": way, "round": number, "read_mb": 100.0 * place + 0.2 * number,
            "written_mb": 10.0 * place, "splits, full graphs": 2, "splits, eager": 1,
        }
        for requests, drafts in ((8, 4), (64, 8), (1, 1))
        for place, way in enumerate(ways)
        for number in range(3)
    ]  # fmt: skip
    rows[1]["read_mb"] = 5_000.0
    return pd.DataFrame(rows)


def test_ways_are_compared_by_their_median_and_disturbed_rounds_are_named(script):
    module = script("attention_dram_table")
    rows = attention_rows(script)
    places = {way: place for place, way in enumerate(module.WAYS)}
    apart = places[module.OURS] - places[module.STOCK]
    reads = module.medians(rows, "read_mb")
    assert module.gap(reads, 64, 8, module.OURS) == pytest.approx(100.0 * apart)
    assert module.gap(reads, 4, 4, module.OURS) is None
    gpu = {"name": "a GPU", "driver": "1"}
    packages = dict.fromkeys(("vllm", "torch", "triton"), "1.0")
    facts = {"command": "it.py", "environment": {"gpus": [gpu], "packages": packages}}
    text = module.text_of(rows, facts, Path("runs"))
    assert "but for round 2 of `nothing` at 8 x 4" in text
    assert "than 0.40 MB" in text  # of the disturbed way's other rounds, 0.0 and 0.4
    assert "8 x 4: 2 in full graphs, 1 eagerly" in text


def test_what_l2_kept_is_what_was_not_written(script):
    module = script("l2_table")
    whole = module.BUFFER_BYTES / 1e6
    rows = pd.DataFrame(
        [
            {"streamed_read_mb": streamed, "streamed_written_mb": 0.0, "way": way,
             "set_aside_mb": 4.0 * ("window" in way), "written_mb": whole * left,
             "read_mb": whole * left, "refused": None}
            for streamed, kept in ((200.0, 0.25), (400.0, 0.0))
            for way, left in (("weights", 0.0), ("normal", 1.0), ("1 x, window", 1 - kept))
        ]
    )  # fmt: skip
    gpu = {"name": "a GPU", "driver": "1"}
    nodes = [f"captured window: {count} nodes: 7 bytes" for count in (3, 1)]
    facts = {
        "command": "it.py",
        "environment": {"gpus": [gpu], "packages": {"torch": "2", "triton": "3"}},
        "nodes": [*nodes, "node window: 1 nodes: 5 bytes"],
    }
    text = module.text_of(rows, facts, Path("runs"))
    assert "(read back: 7 bytes)" in text
    assert "After 0.2 GB read, 25 % of the\nbuffer is still there with 1 x" in text
    assert "After 0.4 GB read, at most 0.0 %" in text


def test_what_is_left_is_told_by_run_and_missing_runs_are_told_too(script):
    module = script("dram_explained")
    left = {"eager-64x8-0.5": 3e6, "eager-engine2-64x8-0.5": 5e6, "eager-copy-64x8-0.5": 1e5,
            "eager-64x8-0.9": 9e6, "eager-emptied-64x8-0.5": -1e6}  # fmt: skip
    assert module._moved(left) == "-5.00 MB at acceptance 0.5"
    assert module.span(left, "eager-copy") == "+0.10"
    assert module.span(left, "eager-64x8") == "+3.00 to +9.00"
    assert module.span(left, "full") == module.NOT_MEASURED == module._moved({})
    assert module.without_splits([])["no_splits"] == module.NOT_MEASURED


def test_an_engine_held_to_fewer_splits_has_no_more(script):
    module = script("dram_parts")
    allowed = {"attention_config": {module.MOST_SPLITS: 1}}
    runs = [
        SimpleNamespace(header=header_of({"spec": spec})) for spec in ({}, {"engine_args": allowed})
    ]
    assert [module._splits(run, 8, 4) for run in runs] == [2, 1]
    assert module._splits(runs[1], 3, 3) is None
