"""What a run compares: a grid of modes, draft counts in one engine, or engines that differ.

Flags, sweep files and run.json name the parts of an experiment; `experiment_of` makes one of three
classes of them. Each knows its cells, the configurations of the engines that
run them, its defaults, and what it refuses. Another kind of comparison is another class here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Self

from nwor_bench.errors import ConfigError
from nwor_bench.records.cell import (
    AA,
    ADAPTIVE,
    ADAPTIVE_VERIFICATION,
    Arguments,
    Arm,
    Cell,
    Count,
    Drafts,
    MethodCount,
    NworMode,
    ScvMode,
    engine_name,
    number_of,
)
from nwor_bench.records.state_slots import ADDITIONAL, one_slot
from nwor_bench.records.types import Interleave
from nwor_bench.workload.method_arms import (
    NUMBER,
    OWN_ENGINES,
    SPECULATION,
    arms_refused,
    counts_of,
    entries_of,
)

if TYPE_CHECKING:
    from nwor_bench.workload.run_spec import RunSpec

ACCEPTANCE_RATES = "synthetic_acceptance_rates"
COUNT_BY_SIZE = "num_speculative_tokens_per_batch_size"
"""Entries of vLLM's speculative_config."""

WHY_LOSSY = {
    "synthetic": "acceptance is synthetic, so tokens do not follow the target",
    "fly": "FLy is lossy by design: it accepts tokens that are not the target's",
}
"""Values of vLLM's rejection_sample_method whose output need not be plain decoding's, and why."""

AT_ONCE = "+"
"""Between the names of `RunSpec.engines_at_once`."""

Modes = tuple[NworMode, ScvMode]
OFF: Modes = NworMode.OFF, ScvMode.OFF
CONTROL: Modes = NworMode.CONTROL, ScvMode.OFF
STAGED_SCV = (), (ScvMode.GRAPH,), (ScvMode.ADAPTIVE,)
"""SCV modes beside off with which an engine with one state slot may stage."""


class CellName(StrEnum):
    """A cell of the grid, by its modes, as --cells names it. off x off, its A/A arm and the control
    are added by themselves."""

    OFF_GRAPH = "off-graph"
    OFF_ADAPTIVE = "off-adaptive"
    STAGE_OFF = "stage-off"
    STAGE_GRAPH = "stage-graph"
    STAGE_ADAPTIVE = "stage-adaptive"

    @property
    def modes(self) -> Modes:
        """The cell's NWOR and SCV mode."""
        nwor, scv = self.split("-")
        return NworMode(nwor), ScvMode(scv)


@dataclass(frozen=True)
class Grid:
    """NWOR modes x SCV modes in one engine."""

    chosen: tuple[Modes, ...]
    """Modes of the cells, in order; off x off among them."""
    has_control: bool
    """Cells of mode stage are compared with their control too."""
    counts: ClassVar[tuple[int, ...]] = ()
    compares_drafts: ClassVar[bool] = False
    asked_by: ClassVar[None] = None

    @classmethod
    def of(cls, asked: "RunSpec") -> Self:
        """Every combination of the modes, or those named beside off x off.

        If cells are interleaved within a batch, mode stage brings its control.
        """
        chosen = list(product(asked.nwor_modes, asked.scv_modes))
        if asked.only_cells is not None:
            kept = [OFF, *(CellName(name).modes for name in asked.only_cells)]
            chosen = [modes for modes in chosen if modes in kept]
        stages = any(nwor is NworMode.STAGE for nwor, _ in chosen)
        has_control = stages and asked.interleave is Interleave.WINDOWS
        return cls(tuple(chosen), has_control or NworMode.CONTROL in asked.nwor_modes)

    def cells(self, pair: str) -> tuple[Cell, ...]:
        """The chosen cells, the control, and last the A/A arm: off x off once more. A control
        commits nothing, so it has one cell, with SCV off."""
        cells = [modes for modes in self.chosen if modes[0] is not NworMode.CONTROL]
        cells += [CONTROL] if self.has_control else []
        return (*(Cell(pair, *modes) for modes in cells), Cell(pair, *OFF, AA))

    def engine_specs(self, spec: "RunSpec") -> "dict[Arm | None, RunSpec]":
        """The one engine's configuration."""
        return {None: spec}

    def completed(self, spec: "RunSpec", on_gpu: bool) -> "RunSpec":
        """The configuration with its default: windows on a GPU, whose clocks move in a batch."""
        default = Interleave.WINDOWS if on_gpu else Interleave.BATCHES
        return replace(spec, interleave=spec.interleave or default)

    def refusals(self, spec: "RunSpec") -> Iterator[ConfigError]:
        """Cells outside of the grid."""
        for name in spec.only_cells or ():
            nwor, scv = name.modes
            if nwor not in spec.nwor_modes or scv not in spec.scv_modes:
                remedy = "its modes are not among --nwor-modes and --scv-modes; add them"
                yield ConfigError.for_field("--cells", name.value, remedy)


@dataclass(frozen=True)
class DraftCounts:
    """Draft counts in one engine, each but 0 staged too if there is a mode for it."""

    counts: tuple[int, ...]
    """Counts that alternate in one engine; none in other experiments."""
    staged: Modes | None
    """Modes of the staged counts; None if none is staged."""
    compares_drafts: ClassVar[bool] = True
    asked_by: ClassVar[None] = None

    @classmethod
    def of(cls, asked: "RunSpec") -> "DraftCounts":
        """The counts in order."""
        stages = NworMode.STAGE in asked.nwor_modes
        staged = (NworMode.STAGE, asked.scv_modes[-1]) if stages else None
        return cls(tuple(sorted(asked.draft_counts or ())), staged)

    def cells(self, pair: str) -> tuple[Cell, ...]:
        """Each draft count, behind it the same one staged, last the A/A arm. In this order the gate
        has the rows of the count in mode off when the staged one has run."""
        cells = []
        for arm in map(Drafts, self.counts):
            cells.append(Cell(pair, *OFF, arm))
            if arm.count and self.staged is not None:
                cells.append(Cell(pair, *self.staged, arm))
        return (*cells, Cell(pair, *OFF, AA))

    def engine_specs(self, spec: "RunSpec") -> "dict[Arm | None, RunSpec]":
        """The one engine's configuration."""
        return {None: spec}

    def completed(self, spec: "RunSpec", on_gpu: bool) -> "RunSpec":
        """The configuration with its default: counts alternate window by window."""
        return replace(spec, interleave=spec.interleave or Interleave.WINDOWS)

    def refusals(self, spec: "RunSpec") -> Iterator[ConfigError]:
        """Counts without 0, further modes, and whole batches."""
        yield from _counts_refused(spec)
        if spec.interleave is Interleave.BATCHES:
            remedy = "draft counts alternate within a batch; leave it out"
            yield ConfigError.for_field("--interleave", spec.interleave.value, remedy)
        yield from _schedule_refused(spec)


def _counts_refused(spec: "RunSpec") -> Iterator[ConfigError]:
    """Each count runs in mode off, and with at most one SCV mode in mode stage."""
    counts, most = spec.draft_counts or (), spec.scenario.draft_tokens
    if 0 not in counts or max(counts) != most or min(counts) < 0:
        remedy = f"write 0 and counts up to draft_tokens, which is {most}, that one too"
        yield ConfigError.for_field("draft_counts", list(counts), remedy)
    if NworMode.CONTROL in spec.nwor_modes:
        remedy = "draft counts have no control; write off, or off and stage"
        yield ConfigError.for_field("--nwor-modes", ",".join(spec.nwor_modes), remedy)
    if spec.scv_modes[0] is not ScvMode.OFF or len(spec.scv_modes) > (2 if spec.stages else 1):
        example = "off and the one mode of staged windows" if spec.stages else "off: nothing stages"
        remedy = f"with draft counts write {example}"
        yield ConfigError.for_field("--scv-modes", ",".join(spec.scv_modes), remedy)
    if spec.only_cells is not None:
        remedy = "draft counts are the cells; leave it out"
        yield ConfigError.for_field("--cells", ",".join(spec.only_cells), remedy)


def _schedule_refused(spec: "RunSpec") -> Iterator[ConfigError]:
    if COUNT_BY_SIZE in (spec.speculative_config or {}):
        remedy = "nwor-bench sets it, to change the draft count; leave it out"
        yield ConfigError.for_field(f"--speculative-config: {COUNT_BY_SIZE}", True, remedy)


@dataclass(frozen=True)
class Engines:
    """Engines that differ, each in a process of its own, compared in whole batches: a second one
    with further arguments (--against), one for each draft count (worth --engines), or one for each
    method, which changes its draft count between batches (worth --arm)."""

    base: Drafts | None
    """Arm of the baseline's cell: k = 0, or None if arguments are compared."""
    others: tuple[Arm, ...]
    """Arms of the further engines, but A/A; none in the configuration of a single engine."""
    modes: Modes = OFF
    """Modes of the further engines' cells."""
    counts: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def of(cls, asked: "RunSpec") -> "Engines":
        """The second engine's arguments, each method's draft counts, or the draft counts, adaptive
        verification last."""
        if asked.against is not None:
            modes = asked.nwor_modes[-1], asked.scv_modes[-1]
            return cls(None, (Arguments.of(asked.against),), modes)
        numbers = sorted(asked.draft_counts or ())
        if asked.arms:
            every = {name: counts_of(arm, numbers) for name, arm in asked.arms.items()}
            found = [MethodCount(name, k) for name, own in every.items() for k in own]
            return cls(Drafts(0), tuple(map(Drafts, found)))
        counts: list[Count] = [count for count in numbers if count]
        counts += [ADAPTIVE] if asked.adaptive_verification else []
        return cls(Drafts(0), tuple(map(Drafts, counts)))

    @property
    def compares_drafts(self) -> bool:
        """True if draft counts are compared, each with an engine or each method with one."""
        return self.base is not None

    @property
    def asked_by(self) -> tuple[str, object]:
        """The flag that asks for several engines, and its value; None in other experiments."""
        if not self.compares_drafts:
            return "--against", str(self.others[0])
        counts = [arm.count for arm in self.others if isinstance(arm, Drafts)]
        methods = dict.fromkeys(c.method for c in counts if isinstance(c, MethodCount))
        return ("--arm", ", ".join(methods)) if methods else ("--engines", True)

    def cells(self, pair: str) -> tuple[Cell, ...]:
        """Each engine's cell, the baseline's first, last the A/A arm."""
        others = (Cell(pair, *self.modes, arm) for arm in self.others)
        return (Cell(pair, *OFF, self.base), *others, Cell(pair, *OFF, AA))

    def engine_specs(self, spec: "RunSpec") -> "dict[Arm | None, RunSpec]":
        """The engines' configurations by arm: None is the baseline's, A/A, which is the same, the
        last; a single one's as it is. If nothing is timed, A/A is the baseline's engine again."""
        if not self.others:
            return {None: spec}
        others = dict.fromkeys(self._engine(spec, arm) for arm in self.others)
        arms = (None, *others) if spec.checks_only else (None, *others, AA)
        return {arm: self._engine_spec(spec, arm) for arm in arms}

    def _engine(self, spec: "RunSpec", arm: Arm) -> Arm:
        """What stands for the arm's engine: its method's name if one engine has all counts."""
        method = (spec.arms or {}).get(engine_name(arm), {OWN_ENGINES: True})
        return arm if method.get(OWN_ENGINES) else Arguments(engine_name(arm))

    def _engine_spec(self, spec: "RunSpec", arm: Arm | None) -> "RunSpec":
        if (method := (spec.arms or {}).get(engine_name(arm))) is not None:
            config = {**(spec.speculative_config or {}), **entries_of(method)}
            own = replace(spec, arms=None, speculative_config=config)
            if isinstance(arm, Drafts):
                return _with_count(own, number_of(arm.count))
            return _with_counts(own, counts_of(method, spec.draft_counts or ()))
        if self.compares_drafts:
            return _with_count(spec, arm.count if isinstance(arm, Drafts) else 0)
        added = dict(spec.against or {}) if isinstance(arm, Arguments) else {}
        config = {**(spec.speculative_config or {}), **added.pop(SPECULATION, {})}
        for name, value in added.items():
            if isinstance(value, dict) and isinstance(base := spec.engine_args.get(name), dict):
                added[name] = {**base, **value}
        drafts = {"draft_tokens": config.get(NUMBER, spec.scenario.draft_tokens)}
        return replace(
            spec, against=None, engine_args={**spec.engine_args, **added},
            speculative_config=entries_of(config) or None,
            scenario=spec.scenario.model_copy(update=drafts),
        )  # fmt: skip

    def completed(self, spec: "RunSpec", on_gpu: bool) -> "RunSpec":
        """The configuration without SCV on a CPU, where it cannot fire: the engine that stages has
        one cell."""
        if self.modes == OFF or on_gpu:
            return spec
        return replace(spec, scv_modes=(ScvMode.OFF,))

    def refusals(self, spec: "RunSpec") -> Iterator[ConfigError]:
        """Engines that do not differ, modes that they cannot have, and interleaved windows."""
        yield from self._counts_refused(spec) if self.compares_drafts else _against_refused(spec)
        flag, _ = self.asked_by
        if spec.interleave is Interleave.WINDOWS:
            remedy = f"engines alternate by whole batches ({flag}); leave it out"
            yield ConfigError.for_field("--interleave", spec.interleave.value, remedy)
        if spec.counters is not None:
            remedy = f"counters are read in one process ({flag} starts several); leave it out"
            yield ConfigError.for_field("--counters", spec.counters.value, remedy)

    def _counts_refused(self, spec: "RunSpec") -> Iterator[ConfigError]:
        yield from arms_refused(spec.arms or {}, spec.draft_counts or ())
        if spec.stages:
            what = "method" if spec.arms else "draft count"
            remedy = f"with an engine for each {what} ({self.asked_by[0]}) NWOR is off; write off"
            yield ConfigError.for_field("--nwor-modes", ",".join(spec.nwor_modes), remedy)
        yield from _counts_refused(spec)
        yield from _schedule_refused(spec)


def _with_count(spec: "RunSpec", count: Count) -> "RunSpec":
    """The configuration of a draft count's own engine; that of 0 has no drafter."""
    drafts = spec.scenario.draft_tokens if count is ADAPTIVE else count
    config = dict(spec.speculative_config or {})
    if ACCEPTANCE_RATES in config:
        config[ACCEPTANCE_RATES] = config[ACCEPTANCE_RATES][:drafts]
    if count is ADAPTIVE:
        config[ADAPTIVE_VERIFICATION] = True
    return replace(
        spec, draft_counts=None, adaptive_verification=False, speculative_config=config or None,
        arms=None, scenario=spec.scenario.model_copy(update={"draft_tokens": drafts}),
    )  # fmt: skip


def _with_counts(spec: "RunSpec", counts: tuple[int, ...]) -> "RunSpec":
    """The configuration of an engine that changes its draft count between batches. vLLM names a
    count for each batch size, so it has room for as many requests."""
    one = _with_count(spec, max(counts))
    room = {"requests": max(one.scenario.requests, len(counts))}
    scenario = one.scenario.model_copy(update=room)
    return replace(one, engines=False, draft_counts=counts, scenario=scenario)


def _against_refused(spec: "RunSpec") -> Iterator[ConfigError]:
    """Engines are compared in mode off, and differ in what `against` says. One with a single state
    slot stages, in one SCV mode."""
    against = spec.against or {}
    if not against:
        example = "write an argument, such as '{\"enable_prefix_caching\": false}'"
        yield ConfigError.for_field("--against", against, example)
    for name, value in against.items():
        if name in spec.engine_args and spec.engine_args[name] == value:
            remedy = "--engine-args gives it to both engines; leave it out"
            yield ConfigError.for_field(f"--against: {name}", value, remedy)
    allowed: list[Any] = [((NworMode.OFF,), (ScvMode.OFF,))]
    remedy = "it compares two engines with NWOR and SCV off; leave the modes and cells out"
    if one_slot(against.get(ADDITIONAL)):
        staged = NworMode.OFF, NworMode.STAGE
        allowed = [(staged, (ScvMode.OFF, *scv)) for scv in STAGED_SCV]
        remedy = "its engine stages; leave out the cells and all modes but --scv-modes off,MODE"
    value = str(Arguments.of(against))
    if (spec.nwor_modes, spec.scv_modes) not in allowed or spec.only_cells is not None:
        yield ConfigError.for_field("--against", value, remedy)
    if spec.draft_counts is not None:
        remedy = "draft counts alternate in one engine, and it compares two; leave one out"
        yield ConfigError.for_field("--against", value, remedy)


Experiment = Grid | DraftCounts | Engines


def experiment_of(asked: "RunSpec") -> Experiment:
    """What a configuration compares."""
    if asked.against is not None or asked.engines:
        every, names = Engines.of(asked), _at_once(asked)
        own = [arm for arm in every.others if not names or engine_name(arm) in names]
        return replace(every, others=tuple(own))
    return Grid.of(asked) if asked.draft_counts is None else DraftCounts.of(asked)


def _at_once(spec: "RunSpec") -> list[str]:
    """Names of the engines beside plain decoding's; none if all are up at once."""
    return [name for name in (spec.engines_at_once or "").split(AT_ONCE) if name]


def refusals(spec: "RunSpec") -> Iterator[ConfigError]:
    """What a run cannot compare."""
    if spec.arms and not spec.engines:
        yield ConfigError.for_field("arms", list(spec.arms), "write engines = true too")
    known = [engine_name(arm) for arm in Engines.of(spec).others] if spec.engines else []
    for name in _at_once(spec):
        if name not in known:
            yield ConfigError.unknown("engines_at_once", name, known)
    if spec.adaptive_verification and (not spec.engines or spec.arms):
        remedy = "it needs an engine of its own; write engines = true (worth: --engines) too"
        remedy = "arms are compared without it; leave it out" if spec.arms else remedy
        yield ConfigError.for_field("--adaptive-verification", True, remedy)
    yield from spec.experiment.refusals(spec)


def with_modes(spec: "RunSpec", given: Mapping[str, Any]) -> "RunSpec":
    """The configuration with the modes of its engines that were not `given`, and whole batches.

    They are off x off, and with `against` one with a single state slot stages. Engines without
    draft counts are two: without drafts, and with the scenario's.
    """
    if spec.against is None and not spec.engines:
        return spec
    stages = one_slot((spec.against or {}).get(ADDITIONAL))
    modes: dict[str, Any] = {
        "nwor_modes": (NworMode.OFF, NworMode.STAGE) if stages else (NworMode.OFF,),
        "scv_modes": (ScvMode.OFF, ScvMode.GRAPH) if stages else (ScvMode.OFF,),
        "draft_counts": (0, spec.scenario.draft_tokens) if spec.engines else None,
        "interleave": Interleave.BATCHES,
    }
    return replace(spec, **{k: v for k, v in modes.items() if given.get(k) is None})
