"""What a dry run says besides cells: when a run may stop, what it counts afterwards."""

from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from nwor_bench.engine import preflight
from nwor_bench.instruments.cards import card_named
from nwor_bench.instruments.device import is_cpu_build, planned_for, uses_gpu
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import run_loaded
from nwor_bench.workload.config import Scenario, load_scenario, resolve
from nwor_bench.workload.prompts import with_own_prompts
from nwor_bench.workload.sweep_file import load_sweep

pytestmark = pytest.mark.usefixtures("own_surroundings")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """The lines of a dry run of the tiny pair with these flags."""

    def run(batches: int = 5, scenario: Scenario | None = None, **flags: Any) -> list[str]:
        spec = resolve(scenario or load_scenario("short"), batches=batches, **flags)
        run_one(spec, PairChoice(pair="tiny"), RunOptions(dry_run=True))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        return lines

    return run


@pytest.mark.slow  # a whole dry run
def test_a_plain_run_stops_nowhere_and_counts_nothing(told: Any) -> None:
    lines = told()
    place = lines.index("cells (NWOR x SCV):")
    assert "5 blocks x 7 cells" in lines[place - 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"ci_width": "0.5%"}, "stops early: every interval within +- 0.5 %"),
        ({"time_budget": "5m"}, "stops early: 300 s after the engine's start"),
        (
            {"ci_width": "1%", "time_budget": "90s"},
            "stops early: every interval within +- 1 %, or 90 s after the engine's start",
        ),
        ({"counters": "dram"}, "untimed batches after them: 4 x 7 for DRAM counters"),
    ],
)
def test_what_may_end_a_run_and_what_is_counted_after_it(
    told: Any, flags: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "uses_gpu", lambda: True)  # else counters are refused
    assert line in told(batches=4, **flags)


@pytest.mark.slow
def test_a_gpu_is_planned_for_without_one(told: Any) -> None:
    """Cells, counters, ranks and memory are those of the named GPU, until the plan is made."""
    with planned_for(card_named("--device", "RTX 4090")):
        lines = told(batches=4, counters="dram", tensor_parallel_size=4)
        assert "  stage x graph" in lines
        assert any(line.endswith(", 23.0 GiB on each RTX 4090") for line in lines)
        with refused("--requests x --max-model-len", naming="23.0 GiB free on the GPU"):
            told(requests=30_000)
    with refused("--counters", value="dram"):
        told(counters="dram")
    with planned_for(card_named("--device", "cpu")):
        assert not uses_gpu()
        assert is_cpu_build()


@pytest.mark.slow
def test_an_engine_for_each_count_is_said(told: Any) -> None:
    """k = 0 and 2, and one more for A/A if it fits."""
    modes = {"nwor_modes": "off", "scv_modes": "off"}
    lines = told(draft_counts=[0, 2], engines=True, **modes)
    assert any(line.endswith("2 or 3 engines, by memory") for line in lines)
    assert any(line.startswith("memory of 2 engines: ") for line in lines)


def test_fewer_prompts_than_requests_are_said(told: Any, tmp_path: Path) -> None:
    said = "1 prompt for 2 requests: they repeat; add prompts, or write --requests 1"
    (tmp_path / "one.jsonl").write_text('{"text": "hello"}')
    one = with_own_prompts(load_scenario("short"), tmp_path / "one.jsonl")
    assert said in told(scenario=one, requests=2)
    assert "repeat" not in " ".join(told(scenario=one, requests=1))


def test_draft_counts_need_three_different_prompts(told: Any, tmp_path: Path) -> None:
    """Tokens of fewer have no interval, however long one measures."""
    path, two, three = tmp_path / "own.jsonl", ("a", "a", "b"), ("a", "b", "c")
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in two))
    counts = {"draft_counts": [0, 1], "nwor_modes": "off", "scv_modes": "off"}
    with refused("--prompts", value="2 prompts", naming="3 different prompts"):
        told(scenario=with_own_prompts(load_scenario("short"), path), **counts)
    assert told(scenario=with_own_prompts(load_scenario("short"), path))
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in three))
    assert told(scenario=with_own_prompts(load_scenario("short"), path), **counts)


def test_a_sweep_says_how_long_it_may_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        '[axes]\npairs = ["tiny"]\nrequests = [2, 4]\n[settings]\ntime_budget = "90s"\n'
    )
    run_loaded(load_sweep(path), RunOptions(dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    assert "engine 1: tiny, up to 4 requests" in lines
    assert lines[-1] == "time: at most 3:00 min, besides engine starts"
