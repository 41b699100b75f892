"""What the scripts behind the DRAM studies compute, on figures made by hand."""

import json
import os
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.synthetic_run import header_of


@pytest.fixture
def engine_script(study):
    """A script of dram-bytes by name."""
    pytest.importorskip("triton")
    return partial(study, "dram-bytes")


@pytest.fixture
def kernel_script(study):
    """A script of dram-kernels by name."""
    pytest.importorskip("triton")
    return partial(study, "dram-kernels")


@pytest.mark.slow
def test_each_way_to_stage_has_a_process_of_its_own(engine_script):
    found = engine_script("measure").each_in_a_process(eval, ["__import__('os').getpid()"] * 2)
    assert len({*found, os.getpid()}) == 3


def test_the_first_that_fails_ends_it(engine_script, tmp_path):
    later = f"open({str(tmp_path / 'later')!r}, 'w')"
    with pytest.raises(ZeroDivisionError):
        engine_script("measure").each_in_a_process(eval, ["1 / 0", later])
    assert not list(tmp_path.iterdir())


def test_splits_leave_an_output_and_a_log_sum_exp_each(engine_script):
    shape = SimpleNamespace(head_dim=128)
    split_bytes = engine_script("parts").split_bytes
    assert split_bytes(10, shape, 1) == 0
    assert split_bytes(10, shape, 3) == 3 * (10 * 128 * 4 + 10 * 4)


def test_a_run_that_did_not_end_has_a_row_without_a_figure(engine_script, tmp_path, monkeypatch):
    gpu = {"name": "a GPU", "driver": "1"}
    packages = dict.fromkeys(("vllm", "torch", "triton"), "1.0")
    environment = {"gpus": [gpu], "packages": packages}
    for name, status in (("eager-hold-8x4", "partial"), ("full-8x4", "complete")):
        (tmp_path / name).mkdir()
        header = {"status": status, "command": f"it {name}", "environment": environment}
        (tmp_path / name / "run.json").write_text(json.dumps(header))
    compact = engine_script("compact")
    monkeypatch.setattr(compact, "read_run", lambda folder: folder.name)
    cells = [{"nwor_mode": "off"}, {"nwor_mode": "stage"}]
    monkeypatch.setattr(compact, "cell_rows", lambda run, alone: iter(cells))
    rows = compact.rows_of([tmp_path], {})
    assert [(row["run"], row["status"], row.get("nwor_mode"), row["command"]) for row in rows] == [
        ("full-8x4", "complete", "off", "it full-8x4"),
        ("full-8x4", "complete", "stage", ""),
        ("eager-hold-8x4", "partial", None, "it eager-hold-8x4"),
    ]
    assert {(row["gpu"], row["driver"], row["vllm"]) for row in rows} == {("a GPU", "1", "1.0")}


def test_what_kernels_read_alone_is_ours_less_stock_by_the_median(
    engine_script, kernel_script, tmp_path
):
    rows = attention_rows(kernel_script)
    places = {way: place for place, way in enumerate(kernel_script("page").WAYS)}
    stock = places["write, attend, read"]
    rows.to_csv(tmp_path / "attention.csv", index=False)
    found = engine_script("compact").read_alone(tmp_path / "attention.csv")
    for case in ("8x4", "64x8"):
        ours = found[f"{case} reference"], found[f"{case} copy"]
        apart = (places["nwor, read"] - stock, places["first, copy, nwor, read"] - stock)
        assert ours == pytest.approx([100e6 * gap for gap in apart])
    assert "4x4 reference" not in found


@pytest.mark.parametrize(("programs", "sharing"), [(1, 0), (5, 5)])
def test_a_pair_that_programs_share_leaves_rows_of_each(engine_script, programs, sharing):
    """64 tokens of context and a window of 4 in steps of 16: five steps of one pair."""
    shape = SimpleNamespace(block_n=16, min_tiles=1, row_tiles=1, rows=16, dim=32, whole_pairs=0)
    module = engine_script("partials")
    one = [68], [4], [10], 1, shape, programs
    assert module.partial_bytes(*one) == sharing * 4 * (10 * 32 + 2 * 16)
    assert module.busy_programs([68], [4], 1, shape, programs) == programs


def attention_rows(kernel_script):
    """Two rounds of every way at 8 x 4, 64 x 8 and 1 x 1; in one of them a way was disturbed."""
    ways = kernel_script("page").WAYS
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


def test_ways_are_compared_by_their_median_and_disturbed_rounds_are_named(kernel_script):
    module = kernel_script("page")
    rows = attention_rows(kernel_script)
    places = {way: place for place, way in enumerate(module.WAYS)}
    apart = places[module.OURS] - places[module.STOCK]
    assert apart > 0
    reads = module.medians(rows, "read_mb")[64, 8]
    assert reads[module.OURS] - reads[module.STOCK] == pytest.approx(100.0 * apart)
    gpu = {"name": "a GPU", "driver": "1"}
    packages = dict.fromkeys(("vllm", "torch", "triton"), "1.0")
    facts = {"command": "it.py", "environment": {"gpus": [gpu], "packages": packages}}
    text = module.text_of(rows, facts)
    assert "but for round 2 of `nothing` at 8 x 4" in text
    assert "than 0.40 MB" in text  # of the disturbed way's other rounds, 0.0 and 0.4
    assert "8 x 4: 2 in full graphs, 1 eagerly" in text


def test_what_is_left_is_told_by_run_and_missing_runs_are_told_too(engine_script):
    module = engine_script("explained")
    left = {"eager-64x8-0.5": 3e6, "eager-engine2-64x8-0.5": 5e6, "eager-copy-64x8-0.5": 1e5,
            "eager-64x8-0.9": 9e6, "eager-emptied-64x8-0.5": -1e6}  # fmt: skip
    assert module._moved(left) == "-5.00 MB at acceptance 0.5"
    assert module.span(left, "eager-copy") == "+0.10"
    assert module.span(left, "eager-64x8") == "+3.00 to +9.00"
    assert module.span(left, "full") == module.NOT_MEASURED == module._moved({})
    assert module.without_splits([])["no_splits"] == module.NOT_MEASURED


def test_an_engine_held_to_fewer_splits_has_no_more(engine_script):
    module = engine_script("parts")
    allowed = {"attention_config": {module.MOST_SPLITS: 1}}
    specs = ({}, {"engine_args": allowed})
    runs = [SimpleNamespace(header=header_of({"spec": spec})) for spec in specs]
    assert [module._splits(run, 8, 4) for run in runs] == [2, 1]
    assert module._splits(runs[1], 3, 3) is None
