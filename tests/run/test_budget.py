"""The time budget: warm-up, gate and blocks fit into it; what does not fit is not measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from synthetic_run import make_run, with_parts
from toy_run import Runner, blocks_of, of_phase

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.findings.sample import ENOUGH_BLOCKS, nothing_timed, sufficient_budget
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import Phase
from nwor_bench.run import budget
from nwor_bench.run.budget import default_amount
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.run_spec import RunSpec
from nwor_bench.workload.stopping import parse_fraction, parse_seconds


class Clock:
    """A clock on which every batch takes `batch_s`."""

    def __init__(self, batch_s: float) -> None:
        self.now = 0.0
        self.batch_s = batch_s

    def perf_counter(self) -> float:
        return self.now

    def before(self, number: int) -> None:
        self.now += self.batch_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(batch_s=0.1)  # the stand-in engine says that a batch took 100 ms
    monkeypatch.setattr(budget, "time", clock)
    return clock


def runner(folder: Path, clock: Clock, seconds: str) -> Runner:
    engine = FakeEngine(before=clock.before, scv_fallback="no_cuda")
    return Runner(folder, engine, batches=3, time_budget=seconds, max_warmup=15)


@pytest.mark.slow
def test_the_whole_run_fits_into_the_budget(tmp_path: Path, clock: Clock) -> None:
    made = runner(tmp_path / "run", clock, "3.5s")
    run = made.run()
    assert clock.now <= 3.5
    # Five batches to warm up, the gate's seven, then as many blocks of three as there is time for.
    assert len(of_phase(run, "warmup")) == 5
    assert len(of_phase(run, "timed")) == 3 * 7
    assert "--time-budget 3.5s" in (made.sweep.stopped or "")


@pytest.mark.slow
def test_warm_up_takes_a_share_and_says_so(tmp_path: Path, clock: Clock) -> None:
    run = runner(tmp_path / "run", clock, "2s").run()
    assert len(of_phase(run, "warmup")) == 3  # a fifth of the budget, with rounding
    text = run.header.warmup.not_steady if run.header.warmup else None
    assert text is not None
    assert "--time-budget left no room for more" in text


@pytest.mark.slow
def test_without_room_for_a_block_nothing_is_timed(tmp_path: Path, clock: Clock) -> None:
    made = runner(tmp_path / "run", clock, "1s")
    run = made.run()
    assert {batch.phase for batch in run.batches} == {"warmup", "gate"}
    assert "stopped after 0 blocks" in made.log.lines[-1]
    for cell in analyse(run).cells:
        assert cell.tokens_per_s is None
        assert cell.ratio_to_off is None


@pytest.mark.slow
def test_the_budget_that_is_named_instead_suffices(tmp_path: Path, clock: Clock) -> None:
    made = runner(tmp_path / "run", clock, "1s")
    stored = made.run()
    ended = {"status": "complete", "stopped": made.sweep.stopped, "measuring_s": clock.now}
    run = with_parts(stored, spec={"time_budget_s": 1.0}, **ended)
    assert nothing_timed(run.header, analyse(run).cells) is not None
    enough = sufficient_budget(run, analyse(run).cells)
    clock.now = 0.0
    again = runner(tmp_path / "again", clock, enough).run()
    assert len({batch.block for batch in of_phase(again, "timed")}) >= ENOUGH_BLOCKS


@pytest.mark.slow  # a run of many blocks
def test_the_blocks_of_an_earlier_try_are_kept_and_counted(tmp_path: Path, clock: Clock) -> None:
    whole = runner(tmp_path / "run", clock, "3.5s").run()
    left = budget.Budget(3.5, read_run(tmp_path / "run"))
    assert len(whole.finished) == 8
    # The gate and seven blocks of three, by the batches' own times.
    assert left.spent_s == pytest.approx(0.1 * (8 + 21), rel=0.02)
    assert left.block_s(Phase.TIMED, 7) == pytest.approx(0.3, rel=0.02)


def interleaved(folder: Path, clock: Clock, blocks: int, seconds: str) -> RunData:
    """Cells are interleaved; the clock counts a tenth of the time that the engine reports, so that
    before the first block whole batches of all cells seem to take most of a second."""
    clock.batch_s = 0.01
    stop = {"time_budget": seconds, "max_blocks": blocks}
    engine = FakeEngine(before=clock.before)
    return Runner(folder, engine, interleave="windows", batches=blocks, **stop).run()


@pytest.mark.slow
def test_a_short_budget_goes_to_interleaved_windows_before_whole_batches(
    tmp_path: Path, clock: Clock
) -> None:
    short = interleaved(tmp_path / "short", clock, 4, "1s")
    assert blocks_of(short, Phase.INTERLEAVED) == [1, 2, 3, 4]
    assert blocks_of(short, Phase.TIMED) == []
    roomy = interleaved(tmp_path / "roomy", clock, 4, "100s")
    assert blocks_of(roomy, Phase.TIMED) == [1, 2, 4]
    order = [batch.phase for batch in roomy.batches if batch.block == 1]
    assert order.index(Phase.INTERLEAVED) < order.index(Phase.TIMED)


def test_two_thirds_of_a_budget_are_for_interleaved_windows(clock: Clock) -> None:
    made = budget.Budget(3.0, replace(make_run(blocks=0), batches=()), interleaved=True)
    made.batch(0.1)
    clock.now += 0.5
    made.block(Phase.INTERLEAVED, 1, 0.25)
    assert made.has_room_to_check(7)  # 0.25 s of warm-up and gate, and 0.7 s
    assert not made.has_room_to_check(8)
    made.block(Phase.INTERLEAVED, 2, 0.25)
    assert made.has_room_to_check(8)


def test_a_gpu_times_within_a_budget_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "uses_gpu", lambda: True)
    found = default_amount({"seed": 1, "batches": None}, load_scenario("short"))
    assert found == {"ci_width": "1%", "time_budget": "120s"}


def test_a_cpu_only_checks_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "uses_gpu", lambda: False)
    short = load_scenario("short")
    found = default_amount({"seed": 1}, short)
    assert found["batches"] == 0
    assert 0 < found["requests"] <= short.requests
    assert 2 <= found["max_new_tokens"] <= short.max_new_tokens
    asked = default_amount({"requests": 6, "max_new_tokens": 20}, short)
    assert asked == {"batches": 0}
    spec = resolve(short, **found)
    assert spec.checks_only
    assert (spec.warmup_batches, spec.stopping.max_blocks) == ((0, 0), 0)


@pytest.mark.parametrize(
    "given", [{"batches": 5}, {"ci_width": "2%"}, {"time_budget": "5m"}, {"max_blocks": 9}]
)
def test_flags_that_say_how_much_replace_the_default(given: dict[str, object]) -> None:
    assert default_amount(given, load_scenario("short")) == {}


def test_the_defaults_are_what_the_flags_take() -> None:
    assert parse_fraction("--ci-width", budget.DEFAULT_CI_WIDTH) == 0.01
    assert parse_seconds("--time-budget", budget.DEFAULT_BUDGET) == 120
    assert RunSpec.__dataclass_fields__["time_budget_s"].default is None


@pytest.mark.parametrize(("max_warmup", "warmup"), [(5, 1), (2, 2), (0, 0)])
def test_a_warm_up_fixed_on_purpose_is_not(max_warmup: int, warmup: int) -> None:
    spec = resolve(load_scenario("short"), warmup=warmup, max_warmup=max_warmup)
    assert spec.warmup_batches == (warmup, max_warmup)
