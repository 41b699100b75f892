"""Several engines as one: which of them runs a cell, and an engine in a process of its own."""

import json
import os
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from fake_engine import DRAFTS, FakeEngine, Tokens
from refusals import refused
from synthetic_run import make_header
from toy_run import Runner, of_phase

from nwor_bench.analysis.analyse import analyse
from nwor_bench.engine import arguments, arms, memory
from nwor_bench.engine.arguments import check_arguments, engine_arguments
from nwor_bench.engine.arms import ChildEngine, EngineArms
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.memory import RUNTIME_BYTES, engines_with_room, kv_cache_bytes
from nwor_bench.engine.preflight import check_flags, check_pair
from nwor_bench.errors import ConfigError, EngineError
from nwor_bench.instruments.device import FreeMemory
from nwor_bench.models.pairs import ResolvedPair, resolve_pair
from nwor_bench.records.cell import Arguments, Arm, Drafts, MethodCount
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, Cell, NworMode, ScvMode, Verdict, WindowRecord
from nwor_bench.report.answer import answer
from nwor_bench.run.resume import check_engine
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import run_loaded
from nwor_bench.workload.config import RunSpec, Scenario, resolve
from nwor_bench.workload.sweep_file import load_sweep

ARM = Arguments("block_size=32")
AGAINST = '{"block_size": 32}'
PAIR = ResolvedPair("toy", "ngram", "hub/toy", None, "float32")
SCENARIO = Scenario(
    name="toy", requests=2, batches=3, draft_tokens=4, max_new_tokens=8, max_model_len=64
)


COUNTS = {"draft_counts": [0, 1, 2], "engines": True, "nwor_modes": "off", "scv_modes": "off"}


def run_with(folder: Path, **engines: FakeEngine) -> tuple[RunData, dict[str | None, FakeEngine]]:
    """A run at temperature 0 on these engines: `baseline`, `arm`, and `aa` or none."""
    names = {"baseline": None, "arm": ARM, "aa": AA}
    own = {names[name]: engine for name, engine in engines.items()}
    runner = Runner(
        folder, EngineArms(own, 1.5, idle_s=0), against=AGAINST, temperature=0.0, batches=4
    )
    return runner.run(), own


def verdicts(run: RunData) -> dict[str, str]:
    return {cell.label: str(cell.verdict) for cell in analyse(run).cells}


def test_each_arm_runs_on_its_engine_and_every_block_runs_all(tmp_path: Path) -> None:
    run, engines = run_with(
        tmp_path / "run", baseline=FakeEngine(), arm=FakeEngine(), aa=FakeEngine()
    )
    assert [len(engine.calls) for engine in engines.values()] == [1 + 1 + 4] * 3
    asked = [[call.prompts for call in engine.calls] for engine in engines.values()]
    assert asked[0] == asked[1] == asked[2]
    for phase in ("gate", "timed"):
        assert len({batch.arm for batch in of_phase(run, phase)}) == 3
    assert set(verdicts(run)) == {"off x off", "off x off (A/A)", f"off x off ({ARM})"}
    assert verdicts(run)["off x off"] == "reference"
    found = answer(run.header, analyse(run).cells)
    assert str(ARM) in found.sentence


def test_without_a_third_engine_the_baselines_runs_twice_a_block(tmp_path: Path) -> None:
    _, engines = run_with(tmp_path / "run", baseline=FakeEngine(), arm=FakeEngine())
    assert [len(engine.calls) for engine in engines.values()] == [2 * 6, 6]


@pytest.mark.parametrize(
    ("guilty", "label", "at"),
    [
        ("arm", f"off x off ({ARM})", 1),  # its gate
        ("aa", "off x off (A/A)", 1),
        ("arm", f"off x off ({ARM})", 3),  # a timed block
    ],
)
def test_an_engine_that_says_other_tokens_is_invalid_and_the_others_are_not(
    tmp_path: Path, guilty: str, label: str, at: int
) -> None:
    engines = {"baseline": FakeEngine(), "arm": FakeEngine(), "aa": FakeEngine()}
    engines[guilty].wrong = lambda number, cell: number == at
    run, _ = run_with(tmp_path / "run", **engines)
    found = verdicts(run)
    assert {name for name, verdict in found.items() if verdict == Verdict.INVALID} == {label}
    assert len(engines[guilty].calls) == at + 1  # not timed further
    said = answer(run.header, analyse(run).cells)
    assert said.badge == Verdict.INVALID
    assert ("off x off itself" in said.sentence) == (guilty == "aa")


class WrongDrafter(FakeEngine):
    """Drafts of the other drafter are never accepted."""

    def _windows(self, asked: Tokens) -> list[WindowRecord]:
        none = {"accepted_tokens": 0, "accepted_per_position": (0,) * DRAFTS}
        return [replace(window, **none) for window in super()._windows(asked)]


@pytest.mark.parametrize("against", ["speculative_config", "block_size"])
def test_an_engine_that_drafts_otherwise_may_accept_another_number(
    tmp_path: Path, against: str
) -> None:
    """The same tokens: only of an engine with the same drafts is its acceptance a fault."""
    given = {against: {"draft_sample_method": "probabilistic"} if "spec" in against else 32}
    arm = Arguments.of(given)
    engines = {None: FakeEngine(), arm: WrongDrafter(), AA: FakeEngine()}
    both = EngineArms(engines, 1.5, idle_s=0)
    runner = Runner(tmp_path / "run", both, against=json.dumps(given), temperature=0.0, batches=4)
    found = verdicts(runner.run())[f"off x off ({arm})"]
    assert (found == Verdict.INVALID) == (against == "block_size")


def test_variables_are_an_engines_own_and_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.setenv(name, "1")
    spec = resolve(SCENARIO, engine_args=json.dumps({name: False, "block_size": 32}))
    assert name not in engine_arguments(PAIR, spec)
    seen: list[str | None] = []
    monkeypatch.setattr(arguments, "on_cpu", lambda: False)
    monkeypatch.setattr(arguments, "_checked_config", lambda *_: seen.append(os.environ.get(name)))
    arguments._check_engine(PAIR, spec)
    assert (seen, os.environ[name]) == (["0"], "1")  # other engines' processes inherit this


def test_status_says_in_what_the_other_engines_differ() -> None:
    engines = {None: FakeEngine(), ARM: FakeEngine(dtype="float16"), AA: FakeEngine()}
    status = EngineArms(engines, 1.234, idle_s=0).status()
    assert status.arms == {str(ARM): {"dtype": "float16"}, str(AA): {}}
    assert (status.dtype, status.start_count, status.start_seconds) == ("float32", 3, 1.23)


def test_layers_of_the_active_engine_are_checked_and_all_engines_stop() -> None:
    engines = {None: FakeEngine(), ARM: FakeEngine(), AA: FakeEngine()}
    asked: list[tuple[str | None, int | None]] = []
    for arm, engine in engines.items():
        engine.check_layers = lambda n, arm=arm: asked.append((arm, n))  # type: ignore[method-assign]
    both = EngineArms(engines, 1.5, idle_s=0)
    both.set_modes(Cell("toy", NworMode.OFF, ScvMode.OFF, ARM))
    both.check_layers(2)
    both.check_layers(None)
    assert asked == [(ARM, 2), (None, None), (ARM, None), (AA, None)]


def test_a_methods_counts_run_on_its_engine_or_on_their_own() -> None:
    eagle, own = Arguments("eagle"), Drafts(MethodCount("suffix", 2))
    engines = {None: FakeEngine(), eagle: FakeEngine(), own: FakeEngine(), AA: FakeEngine()}
    asked: list[tuple[Arm | None, int]] = []
    for arm, engine in engines.items():
        engine.set_modes = lambda c, arm=arm: asked.append((arm, c.fixed_drafts))  # type: ignore[method-assign]
    both = EngineArms(engines, 1.5, idle_s=0)
    counts = (0, MethodCount("eagle", 0), MethodCount("eagle", 2), MethodCount("suffix", 2))
    for ran in (*map(Drafts, counts), AA):
        both.set_modes(Cell("toy", NworMode.OFF, ScvMode.OFF, ran))
    assert asked == [(None, 0), (eagle, 0), (eagle, 2), (own, 2), (AA, 0)]


def served(monkeypatch: pytest.MonkeyPatch, engine: Any, *asked: Any) -> list[Any]:
    """What an engine's process answers to these calls."""
    monkeypatch.setattr(arms, "VllmEngine", engine)
    monkeypatch.setattr(arms.signal, "signal", lambda *_: None)
    ours, theirs = Pipe()
    for each in (*asked, None):
        ours.send(each)
    arms._serve(theirs, PAIR, resolve(SCENARIO), None)
    return [ours.recv() for _ in range(1 + len(asked))]


def test_a_process_calls_the_engines_methods_and_those_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    answers = served(
        monkeypatch,
        lambda *_: engine,
        ("status", (), {}),
        ("kv.watch", (True,), {}),
        ("generate", ([[1]],), {"sampling": None}),
    )
    assert answers[1] == (engine.status(), None)
    assert engine.kv.watched == [True]
    result, error = answers[3]  # no mode was set
    assert (result, type(error)) == (None, EngineError)
    assert "AssertionError" in str(error)
    assert engine.closed == 1


def test_methods_of_a_part_of_the_cache_are_asked_for_by_their_whole_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ChildEngine, "call", lambda self, *given, **named: asked.append(given))
    engine = object.__new__(ChildEngine)  # no process
    engine.kv_cache().watch(True)
    engine.kv_cache().rows.keep("off", ((0, 3),))
    engine.generate([[1]])
    assert asked == [
        ("_kv_cache.watch", True),
        ("_kv_cache.rows.keep", "off", ((0, 3),)),
        ("generate", [[1]]),
    ]


def test_a_process_passes_a_refusal_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError.for_field("--engine-args", "x", "write y")

    monkeypatch.setattr(arms, "VllmEngine", refuse)
    monkeypatch.setattr(arms.signal, "signal", lambda *_: None)
    ours, theirs = Pipe()
    arms._serve(theirs, PAIR, resolve(SCENARIO), None)
    _, error = ours.recv()
    assert (type(error), error.field, error.value) == (ConfigError, "--engine-args", "x")


def answer_once(pipe: Any, *_: Any) -> None:
    """An engine's process that starts and ends."""
    pipe.send((None, None))


@pytest.mark.slow
@pytest.mark.parametrize("starts", [False, True])
def test_a_process_that_ends_is_an_error(starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called with a pipe, `exit` prints it and ends with 1."""
    monkeypatch.setattr(arms, "_serve", answer_once if starts else exit)
    engine = ChildEngine(PAIR, resolve(SCENARIO), None)
    if starts:
        engine.wait_started()
        engine._process.join()
    with refused("one of the run's engines", EngineError, value=0 if starts else 1):
        engine.call("status") if starts else engine.wait_started()
    engine.close()


class Started:
    """An engine's process that notes when it is launched, awaited and closed."""

    said: ClassVar[list[str]] = []
    fails: ClassVar[str | None] = None

    def __init__(self, pair: ResolvedPair, spec: RunSpec, log: Path | None):
        assert log is not None
        self._name = log.stem
        self.said.append(f"launch {self._name}")

    def wait_started(self) -> None:
        self.said.append(f"await {self._name}")
        if self._name == self.fails:
            raise EngineError("it did not start")

    def close(self) -> None:
        self.said.append(f"close {self._name}")


@pytest.mark.parametrize("fails", [None, "engine-1", "engine-3"])
def test_engines_start_together_and_a_a_follows_them(
    fails: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A/A compiles what the baseline has compiled. If one fails, all that were launched close."""
    monkeypatch.setattr(arms, "ChildEngine", Started)
    monkeypatch.setattr(arms, "EngineArms", lambda engines, _: list(engines))
    monkeypatch.setattr(arms, "engines_with_room", lambda pair, spec: spec.engine_specs)
    monkeypatch.setattr(Started, "said", said := list[str]())
    monkeypatch.setattr(Started, "fails", fails)
    spec, log = resolve(SCENARIO, **COUNTS), tmp_path / "engine.log"
    first = ["engine", "engine-1", "engine-2"]
    launched = [f"launch {name}" for name in first]
    if fails is None:
        assert arms.start_engine(PAIR, spec, log) == [None, Drafts(1), Drafts(2), AA]
    else:
        with pytest.raises(EngineError, match="did not start"):
            arms.start_engine(PAIR, spec, log)
    assert said[:4] == [*launched, "await engine"]
    assert ("launch engine-3" in said) == (fails != "engine-1")
    closed = {line for line in said if line.startswith("close")}
    is_last = fails == "engine-3"
    assert closed == {f"close {name}" for name in first + ["engine-3"] * is_last if fails}


@pytest.mark.parametrize(
    ("settings", "naming"),
    [("[settings.against]\nblock_size = 32\n", "against"),
     ("[settings]\ndraft_counts = [0, 4]\nengines = true\n", "engines")],
)  # fmt: skip
def test_ray_is_refused(tmp_path: Path, settings: str, naming: str) -> None:
    file, off = tmp_path / "s.toml", 'nwor_modes = ["off"]\nscv_modes = ["off"]\n'
    file.write_text(f'[axes]\npairs = ["tiny-ngram"]\n{off}{settings}')
    with refused("--ray", value=True, naming=naming):
        run_loaded(load_sweep(file), RunOptions(ray=True, output=tmp_path / "out", quiet=True))


def spec_of(**given: Any) -> RunSpec:
    return resolve(SCENARIO, against=AGAINST, **given)


@pytest.mark.parametrize(
    ("given", "arms_with_room", "named"),
    [
        ({"against": AGAINST}, [None, ARM, AA], ("--against", str(ARM), "")),
        (COUNTS, [None, Drafts(1), Drafts(2), AA], ("--engines", True, "3 engines")),
    ],
)
def test_the_a_a_arm_has_an_engine_if_there_is_memory(
    given: dict[str, Any],
    arms_with_room: list[Arm | None],
    named: tuple[str, Any, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others must have one each."""
    spec = resolve(SCENARIO, **given)
    sizes = [
        kv_cache_bytes(PAIR, own) + RUNTIME_BYTES["host"] for own in spec.engine_specs.values()
    ]

    def free(size: int) -> None:
        monkeypatch.setattr(memory, "free_memory", lambda ranks: FreeMemory(size, "host"))

    free(sum(sizes))
    assert list(engines_with_room(PAIR, spec)) == arms_with_room
    free(sum(sizes) - 1)
    assert list(engines_with_room(PAIR, spec)) == arms_with_room[:-1]
    memory.require_memory(PAIR, spec)
    free(sum(sizes[:-1]) - 1)
    field, value, naming = named
    with refused(field, value=value, naming=naming):
        memory.require_memory(PAIR, spec)


METHODS = {"a": {"method": "eagle"}, "b": {"method": "mtp", "engines": True},
           "c": {"method": "ngram"}}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "room", "groups"),
    [
        ({"arms": METHODS}, 5, [None]),  # plain decoding, a, two engines of b, c
        ({"arms": METHODS}, 4, ["a+b", "c"]),
        ({"arms": METHODS}, 3, ["a", "b", "c"]),
        ({"arms": METHODS}, 2, ["a", "b", "c"]),
        ({"arms": METHODS, "engines_at_once": "b+c"}, 3, ["b+c"]),  # as the file says
        ({}, 2, ["k=1", "k=2"]),
    ],
)
def test_engines_that_do_not_fit_at_once_are_groups_that_do(
    given: dict[str, Any], room: int, groups: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they are written. What does not fit beside plain decoding is refused,
    and only that."""
    spec = resolve(SCENARIO, **COUNTS, **given)
    size = max(memory.needed_bytes(PAIR, own, "host") for own in spec.engine_specs.values())
    monkeypatch.setattr(memory, "free_memory", lambda ranks: FreeMemory(room * size, "host"))
    found = memory.groups_with_room(PAIR, spec)
    assert [own.engines_at_once for own in found] == groups
    for own in found:
        others = len([arm for arm in own.engine_specs if arm not in (None, AA)])
        if others < room:
            memory.require_memory(PAIR, own)
        else:
            with refused("--arm", value="b" if room == 2 else "b, c", naming="leave it out"):
                memory.require_memory(PAIR, own)


def test_the_engine_of_k_0_has_no_drafter() -> None:
    """Neither its weights nor its cache, and vLLM is asked for no speculation."""
    pair = resolve_pair("tiny")
    spec = resolve(SCENARIO.model_copy(update={"max_model_len": 256}), **COUNTS)
    plain, drafting = spec.engine_specs[None], spec.engine_specs[Drafts(2)]
    assert memory.needed_bytes(pair, plain, "host") < memory.needed_bytes(pair, drafting, "host")
    assert engine_arguments(pair, plain)["speculative_config"] is None
    config = engine_arguments(pair, drafting)["speculative_config"]
    assert config["num_speculative_tokens"] == 2
    assert "num_speculative_tokens_per_batch_size" not in config


def test_adaptive_verification_is_refused_on_the_older_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM itself would take another runner for it, unless the environment names this one."""
    asked: list[str | None] = []

    def check(pair: ResolvedPair, spec: RunSpec) -> Any:
        asked.append((spec.speculative_config or {}).get("enable_adaptive_verification"))
        return SimpleNamespace(use_v2_model_runner=False)

    monkeypatch.setattr("nwor_bench.engine.arguments._check_engine", check)
    pair = ResolvedPair("toy", "eagle", "hub/toy", "hub/draft", "float32")
    check_arguments(pair, resolve(SCENARIO, **COUNTS))
    assert asked == [None] * 3  # each count's engine
    with refused("--adaptive-verification", value=True):
        check_arguments(pair, resolve(SCENARIO, **COUNTS, adaptive_verification=True))


@pytest.mark.parametrize("adaptive", [True, False])
def test_an_engine_that_verifies_every_draft_after_all_is_refused(adaptive: bool) -> None:
    engine = VllmEngine.__new__(VllmEngine)
    closed: list[bool] = []
    engine._rpc = lambda method: adaptive  # type: ignore[method-assign,assignment]
    engine.close = lambda: closed.append(True)  # type: ignore[method-assign]
    if adaptive:
        engine._require_adaptive(PAIR)
    else:
        with refused("enable_adaptive_verification", value=True):
            engine._require_adaptive(PAIR)
    assert closed == [] if adaptive else [True]


def test_acceptance_is_synthetic_if_an_engine_says_so() -> None:
    """The baseline, without drafts, accepts none in any way."""
    engines = {None: FakeEngine(), Drafts(1): FakeEngine()}
    synthetic = (
        engines[Drafts(1)].status().model_copy(update={"rejection_sample_method": "synthetic"})
    )
    engines[Drafts(1)].status = lambda: synthetic  # type: ignore[method-assign]
    assert EngineArms(engines, 1.5, idle_s=0).status().rejection_sample_method == "synthetic"


def test_draft_counts_run_on_their_engines(tmp_path: Path) -> None:
    """The gate compares each with k = 0, and every timed block runs all."""
    engines = {arm: FakeEngine() for arm in (None, Drafts(1), Drafts(2))}
    engines[Drafts(2)].wrong = lambda number, cell: number == 2  # its second timed block
    given = {**COUNTS, "draft_tokens": 2, "temperature": 0.0, "batches": 3, "warmup": 0}
    run = Runner(tmp_path / "run", EngineArms(engines, 1.5, idle_s=0), **given).run()
    assert [len(engine.calls) for engine in engines.values()] == [8, 4, 3]
    parity = {batch.cell.label: batch.parity for batch in of_phase(run, "gate")}
    assert list(parity) == ["k = 0", "k = 1", "k = 2", "off x off (A/A)"]
    broken = [event for event in run.events if event.get("event") == "parity_broken"]
    assert [event["arm"] for event in broken] == ["k=2"]


def test_an_argument_that_vllm_does_not_know_is_refused() -> None:
    spec = resolve(SCENARIO, against='{"blok_size": 32}')
    with refused("--against", value="blok_size", near="block_size"):
        check_flags(spec)


def test_an_arms_entry_that_vllm_does_not_know_is_refused() -> None:
    entries = {"method": "ngram", "prompt_lookup_mx": 3}
    spec = resolve(SCENARIO, **{**COUNTS, "arms": {"mine": entries}})
    with refused("--arm: mine", value="prompt_lookup_mx", near="prompt_lookup_max"):
        check_flags(spec)


@pytest.mark.slow
def test_arguments_that_change_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own configuration says so, not the arguments: it caches prefixes by default."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    scenario = SCENARIO.model_copy(update={"max_model_len": 128})
    spec = resolve(scenario, against='{"enable_prefix_caching": true}')
    with refused("--against", value="enable_prefix_caching=true"):
        check_arguments(resolve_pair("tiny-ngram"), spec)
    check_arguments(resolve_pair("tiny-ngram"), resolve(scenario, against=AGAINST))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "more", "field"),
    [
        ("tiny-ngram", {}, "--against: additional_config: nwor_state_slots"),
        ("tiny-states-mtp", {"enable_prefix_caching": True}, "enable_prefix_caching"),
        ("tiny-states-mtp", {"enable_prefix_caching": False}, None),
    ],
)
def test_one_state_slot_is_refused_before_an_engine_starts(
    pair: str, more: dict[str, Any], field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    against = json.dumps({"additional_config": {"nwor_state_slots": 1}, **more})
    scenario = SCENARIO.model_copy(update={"max_model_len": 128})
    spec, found = resolve(scenario, against=against), resolve_pair(pair)
    if field is None:
        check_arguments(found, spec)
        return
    with refused(field):
        check_arguments(found, spec)


def test_a_run_goes_on_with_as_many_engines() -> None:
    engines = {None: FakeEngine(), ARM: FakeEngine(), AA: FakeEngine()}
    three = EngineArms(engines, 1.5, idle_s=0).status()
    del engines[AA]
    header = make_header([]).model_copy(update={"engine": three})
    run = RunData(header, (), (), ())
    check_engine(run, three)
    with refused("--resume: engine.arms", value=[str(ARM)]):
        check_engine(run, EngineArms(engines, 1.5, idle_s=0).status())


class Synthetic(FakeEngine):
    """Accepts drafts at a set rate."""

    def status(self) -> EngineStatus:
        return super().status().model_copy(update={"rejection_sample_method": "synthetic"})


class SyntheticOtherwise(Synthetic, WrongDrafter):
    """Draws other numbers."""


def test_with_synthetic_acceptance_another_engine_may_draw_others(tmp_path: Path) -> None:
    engines = {"baseline": Synthetic(), "arm": SyntheticOtherwise(), "aa": Synthetic()}
    run, _ = run_with(tmp_path / "run", **engines)
    cells = {cell.label: cell for cell in analyse(run).cells}
    found = cells[f"off x off ({ARM})"]
    assert (found.parity, found.verdict) == ("acceptance only", Verdict.SAME), found.reason
    assert found.ratio is not None
    with refused("--acceptance-length", value=2.5):  # a CPU has none
        check_pair(PAIR, spec_of(acceptance_length=2.5))


def test_engines_that_compile_the_same_start_one_after_another() -> None:
    arms_of = {
        "eagle": {"method": "eagle"},
        "poor": {"method": "eagle"},
        "ngram": {"method": "ngram"},
    }
    head = replace(PAIR, method="eagle", draft="hub/head")
    pair = replace(PAIR, arms={"eagle": head, "poor": head, "ngram": PAIR})
    spec = resolve(SCENARIO, **COUNTS, arms=arms_of)
    found = arms._start_groups(pair, spec.engine_specs)
    eagle, poor, ngram = map(Arguments, arms_of)
    assert found == [[None, eagle, ngram], [poor, AA]]
    each = resolve(SCENARIO, **COUNTS).engine_specs
    assert arms._start_groups(PAIR, each) == [[None, Drafts(1), Drafts(2)], [AA]]
    against = resolve(SCENARIO, against=AGAINST).engine_specs
    assert arms._start_groups(PAIR, against) == [[None, ARM], [AA]]
