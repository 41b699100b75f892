"""Runs for `compare` read from their folders, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused
from synthetic_run import header_of, make_run, save_run, with_parts

from nwor_bench.analysis.stored_run import differences, load_stored
from nwor_bench.models.pairs import DEFAULT_PAIR, load_pair
from nwor_bench.records.store import read_header
from nwor_bench.workload.config import load_scenario

pytestmark = pytest.mark.slow  # whole runs


RUN = make_run(blocks=8, device="cuda", aa=True)
CHECKOUT = Path(__file__).resolve().parents[2]


def test_todays_default_run_is_comparable_with_the_kept_one() -> None:
    """What `make sweep` measures is still what the kept run measured."""
    pair = load_pair(DEFAULT_PAIR)
    today = header_of({
        "scenario": load_scenario("short").model_dump(mode="json"),
        "pair": {"name": pair.name, "method": pair.method, "speculative": pair.speculative,
                 "draft": pair.packaged and pair.packaged.drafter},
    })  # fmt: skip
    kept = read_header(CHECKOUT / "sweeps/results/cpu-2-cores")
    assert differences(kept, today)[0] == []


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    save_run(with_parts(RUN, status="partial"), tmp_path / "run")
    assert "status: partial" in load_stored(tmp_path / "run").warnings[0]
    save_run(RUN, tmp_path / "whole")
    assert load_stored(tmp_path / "whole").warnings == ()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with refused("run folder", value=str(tmp_path / "nowhere"), naming="run.json"):
        load_stored(tmp_path / "nowhere")
    (tmp_path / "sweep.json").write_text("{}")
    with refused("run folder", value=str(tmp_path), naming="a sweep of several runs"):
        load_stored(tmp_path)
    save_run(replace(RUN, batches=(), windows=()), tmp_path / "empty")
    with refused("run folder", value=str(tmp_path / "empty")):
        load_stored(tmp_path / "empty")
    save_run(RUN, tmp_path / "torn")
    (tmp_path / "torn" / "records.jsonl").unlink()
    with refused("run folder", value=str(tmp_path / "torn"), naming="records.jsonl.gz"):
        load_stored(tmp_path / "torn")
