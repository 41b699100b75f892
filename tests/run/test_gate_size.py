"""How large the gate of a timed run is: its prompts, its tokens, its share of the time budget."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from toy_run import POOL, Log, Runner, of_phase

from nwor_bench.records.header import GateFacts
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase
from nwor_bench.run import resume
from nwor_bench.run.gate import size
from nwor_bench.run.gate.size import (
    MAX_PROMPT_TOKENS,
    MIN_WHOLE,
    SHORT,
    GateSize,
    cut_lengths,
)
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import make_plan
from nwor_bench.workload.stopping import CHECK_SHARE

LENGTHS = st.lists(st.integers(1, 3_000), min_size=1, max_size=40)


@given(LENGTHS, st.integers(0, 60_000))
def test_a_prompt_is_whole_or_short_and_the_longest_is_whole(lengths: list[int], most: int) -> None:
    cut = cut_lengths(lengths, most)
    assert all(own in (whole, SHORT) for own, whole in zip(cut, lengths, strict=True))
    assert max(cut) == max(lengths)
    whole = sum(own == length for own, length in zip(cut, lengths, strict=True))
    assert whole >= min(MIN_WHOLE, len(lengths))
    if sum(lengths) <= most:
        assert list(cut) == lengths
    longest = sorted(lengths)[-MIN_WHOLE:]
    assert sum(cut) <= max(most, sum(longest) + sum(min(n, SHORT) for n in lengths))


def of_256(**changes: Any) -> GateSize:
    """The gate of 256 requests of 1,024 tokens in six cells, with an A/A arm."""
    given = {"requests": 256, "interleave": "windows", "time_budget": "60s", **changes}
    modes = {"nwor_modes": "off,stage,control", "scv_modes": "off,graph"}
    spec = resolve(load_scenario("ctx-1k"), **given, **modes)
    plan = make_plan(spec, "toy", [Prompt(str(n), "chat", "x") for n in range(256)])
    return GateSize(plan, lambda prompts: [[n] * 1024 for n in range(len(prompts))], spec)


def test_at_256_requests_the_gate_prefills_less_than_two_of_its_batches_did() -> None:
    """Six cells and interleaved windows twice; K/V of off x off twice, of five that stage."""
    tokens = of_256().tokens
    assert (tokens.requests, tokens.batches, tokens.prefills) == (256, 8, 7)
    assert tokens.prompt <= MAX_PROMPT_TOKENS
    assert tokens.new == 64
    assert tokens.prefilled == 15 * tokens.prompt + 7 * 256 * 63
    assert tokens.prefilled < 2 * 256 * 1024
    whole = of_256(batches=0, time_budget=None).tokens
    assert (whole.prompt, whole.new) == (256 * 1024, 256)


class Rated(FakeEngine):
    """Takes `seconds` a batch, and a tenth of it for its windows."""

    seconds = 1.0

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> Any:
        output = super().generate(prompts, sampling, **more)
        wall_ms = 100 * self.seconds / len(output.windows)
        windows = [replace(window, wall_ms=wall_ms) for window in output.windows]
        return replace(output, latency_ms=1e3 * self.seconds, windows=windows)


def long_prompts(prompts: tuple[Prompt, ...]) -> list[list[int]]:
    return [[len(prompt.text), *range(1, 50)] for prompt in prompts]


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 50 tokens of which a batch of eight may have 200, a short one 10."""
    monkeypatch.setattr("toy_run.encode", long_prompts)
    monkeypatch.setattr(size, "MAX_PROMPT_TOKENS", 200)
    monkeypatch.setattr(resume, "MAX_PROMPT_TOKENS", 200)
    monkeypatch.setattr(size, "SHORT", 10)


def swept(folder: Path, engine: FakeEngine, **changes: Any) -> Runner:
    given = {"requests": 8, "batches": 1, "interleave": "windows", **changes}
    runner = Runner(folder, engine, **given)
    runner.run()
    return runner


@pytest.mark.usefixtures("long")
def test_every_cell_runs_the_same_cut_prompts_and_the_record_says_so(tmp_path: Path) -> None:
    runner = swept(tmp_path / "run", FakeEngine())
    run = read_run(runner.folder)
    phases = (Phase.GATE, Phase.INTERLEAVED_GATE, Phase.WARMUP)
    gate = [batch for phase in phases for batch in of_phase(run, phase)]
    assert len(gate) == len(runner.plan.cells) + 3
    assert {batch.prompt_tokens for batch in gate} == {3 * 50 + 5 * 10}
    assert len({batch.prompt_digest for batch in gate}) == 1
    assert {batch.prompt_tokens for batch in of_phase(run, Phase.TIMED)} == {8 * 50}
    facts = run.header.gate
    assert facts is not None
    assert (facts.requests, facts.whole, facts.prompt_tokens) == (8, 3, 200)
    cut = [prompt for prompt in runner.engine.calls[1].prompts if len(prompt) == 10]
    assert all(prompt[1:] == tuple(range(41, 50)) for prompt in cut)  # the first token, the end
    resume.check_plan(run, runner.plan, long_prompts)


@pytest.mark.usefixtures("long")
def test_a_run_that_only_checks_cuts_nothing(tmp_path: Path) -> None:
    run = read_run(swept(tmp_path / "run", FakeEngine(), batches=0, max_warmup=None).folder)
    assert {batch.prompt_tokens for batch in run.batches} == {8 * 50}
    assert run.header.gate == GateFacts(
        requests=8, whole=8, prompt_tokens=400, longest_prompt=50, new_tokens=8,
        room_s=run.header.gate.room_s if run.header.gate else None,
    )  # fmt: skip


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(("seconds", "whole"), [(0.001, 3), (1.0, 2)])
def test_a_gate_that_would_take_more_than_its_third_is_cut_but_never_skipped(
    tmp_path: Path, seconds: float, whole: int
) -> None:
    engine = Rated()
    engine.seconds = seconds
    runner = swept(tmp_path / "run", engine, time_budget="30s", max_blocks=1)
    run = read_run(runner.folder)
    facts = run.header.gate
    assert facts is not None
    assert facts.room_s is not None
    assert facts.forecast_s is not None
    assert facts.room_s <= CHECK_SHARE * 30
    assert facts.whole == whole
    assert len(of_phase(run, Phase.GATE)) == len(runner.plan.cells)
    resume.check_plan(run, runner.plan, long_prompts)


@pytest.mark.usefixtures("long")
def test_a_forecast_follows_the_tokens(tmp_path: Path) -> None:
    """1 s a batch of 200 tokens: 0.9 s of prefill, 0.1 s of windows. Ten batches, and prefills of
    prompts and outputs for the K/V gate."""
    runner = swept(tmp_path / "run", Rated(), time_budget="600s", max_blocks=1)
    facts = read_run(runner.folder).header.gate
    assert facts is not None
    cells = len(runner.plan.cells)
    staging = sum(cell.nwor_mode != "off" for cell in runner.plan.cells)
    prefills = 2 + staging + 2
    tokens = (cells + 2 + prefills) * 200 + prefills * 8 * 7
    assert facts.forecast_s == pytest.approx(0.0045 * tokens + 0.1 * (cells + 2), rel=1e-3)


def test_blocks_of_a_set_length_share_their_contexts_but_those_that_are_compared() -> None:
    scenario = load_scenario("ctx-1k")
    spec = resolve(scenario, requests=2, interleave="windows", batches=40)
    plan = make_plan(spec, "toy", POOL)
    shared = [block.number for block in plan.blocks if plan.shares_contexts(block)]
    # Texts change at 1, 17 and 33; 1, 8 and 16 have whole batches too.
    assert shared == [n for n in range(1, 41) if n not in (1, 8, 16, 17, 33)]
    few = [block.number for block in plan.blocks if block.new_tokens == 64]
    assert few == [n for n in range(1, 41) if plan.has_whole_batches(plan.blocks[n - 1])]
    assert {block.new_tokens for block in plan.blocks} == {64, None}  # None: the scenario's 256
    own_text = make_plan(replace(spec, scenario=load_scenario("short")), "toy", POOL)
    assert not any(map(own_text.shares_contexts, own_text.blocks))


class Caching(FakeEngine):
    """Remembers which batches kept the prefix cache."""

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> Any:
        if more.get("keep_prefix_cache"):
            self.kept = [*getattr(self, "kept", []), tuple(map(tuple, prompts))]
        return super().generate(prompts, sampling, **more)


def test_only_batches_behind_one_of_the_same_prompts_keep_the_prefix_cache(tmp_path: Path) -> None:
    engine = Caching()
    runner = Runner(tmp_path / "run", engine, interleave="windows", batches=4)
    first, *_ = blocks = runner.plan.blocks
    alike = tuple(replace(block, prompts=first.prompts) for block in blocks)
    runner.sweep.plan = replace(runner.plan, blocks=alike)
    runner.sweep.run()
    assert isinstance(runner.log, Log)
    whole = [block.number for block in alike if runner.sweep.plan.has_whole_batches(block)]
    assert whole == [1, 2, 4]
    assert len(engine.kept) == 1  # block 3
