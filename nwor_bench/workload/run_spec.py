"""The options of a run: models, workload, modes, and when to stop."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Interval

from nwor_bench.errors import ConfigError
from nwor_bench.records.cell import Arguments, Arm
from nwor_bench.records.state_slots import ADDITIONAL, one_slot
from nwor_bench.records.types import AttentionBy, Interleave, NworMode, ScvMode, StageBy
from nwor_bench.workload.experiment import (
    ACCEPTANCE_RATES,
    CellName,
    Experiment,
    experiment_of,
)
from nwor_bench.workload.method_arms import METHOD, MODEL, SPECULATION, MethodArm
from nwor_bench.workload.options import (
    Axis,
    Compare,
    Declared,
    Option,
    Panel,
    axes_of,
    declared,
    to_plain,
)
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.stopping import MAX_BLOCKS, StoppingRule, parse_half_width, parse_seconds

if TYPE_CHECKING:
    from nwor_bench.workload.config import Scenario

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

CacheDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head",
    "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
]  # fmt: skip
"""vLLM's kv_cache_dtype, auto being the model's; importing it from vLLM would take seconds."""

MAX_DRAFT_TOKENS = 128
"""vLLM's MAX_SPEC_LEN: its rejection sampler asserts that a request has no more drafts."""

MAX_GIB = 1_000_000


def includes_off(modes: tuple[str, ...]) -> str | None:
    """What to write instead of modes without off."""
    if "off" in modes:
        return None
    return f"write off,{','.join(modes)}: every cell is compared with off x off"


def bytes_of_gib(field: str, given: float) -> int:
    """Bytes of a size in GiB. Raises ConfigError if it is not positive, or too large."""
    if not 0 < given <= MAX_GIB:
        raise ConfigError.for_field(field, given, f"write more than 0, {MAX_GIB} at most")
    return int(given * 2**30)


class Counters(StrEnum):
    """What is counted in untimed blocks after the timed ones."""

    DRAM = "dram"


@dataclass(frozen=True)
class PairChoice:
    """The pair as the command line names it; all None is the default pair."""

    # fmt: off
    pair: Annotated[str | None, Option(
        "A model pair's name or .toml file (default: smollm2).", Panel.MODELS,
    )] = None
    target_model: Annotated[str | None, Option(
        "A local folder or hub name, instead of --pair.", Panel.MODELS, table="settings",
        flag="--model", aliases=("--target-model",), flag_variable="TARGET_MODEL",
        engine_argument="model",
    )] = None
    draft_model: Annotated[str | None, Option(
        "The drafter: a local folder or hub name.", Panel.MODELS, table="settings",
        aliases=("--speculative-model",), flag_variable="DRAFT_MODEL",
    )] = None
    method: Annotated[str | None, Option(
        "How to draft: mtp, eagle3, eagle, dflash, dspark, draft_model, ngram, ngram_gpu, suffix.",
        Panel.MODELS, table="settings",
    )] = None
    # fmt: on

    @property
    def name(self) -> str:
        """For labels and folders: the pair's, or the target's last part."""
        return self.pair or Path(self.target_model or DEFAULT_PAIR).name

    def with_config(self, config: Mapping[str, Any] | None) -> "PairChoice":
        """Take the method and the drafter from vLLM's speculative_config if no flag names them.

        Raises ConfigError if a flag contradicts it.
        """
        draft_model = _agreed("--draft-model", self.draft_model, config, "model")
        method = _agreed("--method", self.method, config, "method")
        return replace(self, draft_model=draft_model, method=method)


def _agreed(
    flag: str, given: str | None, config: Mapping[str, Any] | None, name: str
) -> str | None:
    value = (config or {}).get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError.for_field(f"--speculative-config: {name}", value, "write a text")
    if value is not None and given not in (None, value):
        raise ConfigError.for_field(
            flag, given, f"--speculative-config says {name} {value!r}; give one of the two"
        )
    return given if value is None else value


DEFAULT_PAIR = "smollm2"
DEFAULT_SCENARIO = "short"


@dataclass(frozen=True)
class ScenarioChoice:
    """The scenario as the command line names it."""

    # fmt: off
    scenario: Annotated[str, Option(
        "A scenario's name, or the path of a scenario's .toml file.",
    )] = DEFAULT_SCENARIO
    prompts: Annotated[str | None, Option(
        "Your prompts instead of the scenario's: a .jsonl file with `text` or `prompt` in each "
        "line.", table="settings",
    )] = None
    # fmt: on


DEFAULT_MAX_WARMUP = 15
WARMUP_LOOKBACK = 5
"""Batches that must be steady. Five rising or falling in a row have p = 0.017, four 0.083."""


@dataclass(frozen=True)
class RunSpec:
    """All that a run needs besides its model pair: what resuming and comparing go by."""

    scenario: "Scenario"
    """The workload, with the values of flags and sweep files already in it."""
    # fmt: off
    nwor_modes: Annotated[tuple[NworMode, ...], Option(
        "off, stage, control: how drafts' K/V is written (default: off,stage).", Panel.MODES,
        written=tuple[NworMode, ...], check=includes_off, table="axes",
    )] = (NworMode.OFF, NworMode.STAGE)
    """Rows of the grid of cells."""
    scv_modes: Annotated[tuple[ScvMode, ...], Option(
        "off, graph, adaptive: how acceptance is computed (default: all).", Panel.MODES,
        written=tuple[ScvMode, ...], check=includes_off, table="axes",
    )] = tuple(ScvMode)
    """Columns of the grid of cells."""
    only_cells: Annotated[tuple[CellName, ...] | None, Option(
        "Only these cells, e.g. stage-graph; off x off, its A/A arm and the control are added.",
        Panel.MODES, name="cells", table="settings",
    )] = None
    """Cells of the grid to measure; None for all."""
    draft_counts: Annotated[tuple[int, ...] | None, Option(
        "Draft counts to interleave, 0 among them; see nwor-bench worth.",
        has_flag=False, table="settings", compare=Compare.REFUSE,
    )] = None
    """The cells are these draft counts, and each but 0 staged too if mode stage is asked for; None
    for a grid of modes."""
    engines: Annotated[bool, Option(
        "An engine for each draft count, compared in whole batches; see nwor-bench worth.",
        has_flag=False, table="settings", compare=Compare.REFUSE,
    )] = False
    """Each draft count has an engine of its own, k = 0 one without a drafter."""
    arms: Annotated[dict[str, dict[str, Any]] | None, Option(
        "Ways to draft, each a table of vLLM's speculative_config; see nwor-bench worth --arm.",
        has_flag=False, table="settings", compare=Compare.REFUSE,
    )] = None
    """Methods that are compared, by name (`method_arms`); None if the run has one."""
    engines_at_once: Annotated[str | None, Option(
        "Methods, or draft counts such as k=1, whose engines fit in memory together: NAME+NAME.",
        has_flag=False, compare=Compare.TELL, axis=Axis(7, "{}", "{}", is_slow=True),
    )] = None
    """Names of the engines beside plain decoding's that this run has; None for all."""
    adaptive_verification: Annotated[bool, Option(
        "With engines: one more, in which vLLM decides how many drafts to verify (GPU).",
        has_flag=False, table="settings", compare=Compare.REFUSE,
    )] = False
    """A cell more, whose engine drafts the largest count and verifies adaptively."""
    stage_by: Annotated[StageBy, Option(
        "reference, copy: how a GPU stages drafts' K/V.", has_flag=False, table="settings",
        worker_variable="VLLM_NWOR_STAGE_BY", compare=Compare.TELL,
    )] = StageBy.REFERENCE
    attention: Annotated[AttentionBy, Option(
        "auto, ours, merge, stock: what attends windows on a GPU (auto: the fastest).",
        Panel.MODES, table="settings", flag_variable="VLLM_NWOR_ATTENTION",
        worker_variable="VLLM_NWOR_ATTENTION", compare=Compare.TELL,
    )] = AttentionBy.AUTO
    seed: Annotated[int, Option(
        "Seed of prompts, order, sampling (default: 0).", Panel.WORKLOAD, written=int,
        table="settings", engine_argument="seed",
    ), Interval(ge=0, le=2**32 - 1)] = 0
    interleave: Annotated[Interleave | None, Option(
        "windows, batches: how cells are interleaved (default: windows on a GPU).", Panel.PRECISION,
        table="settings", compare=Compare.TELL,
    )] = None
    """How cells are interleaved; None before the machine is known."""
    max_warmup: Annotated[int | None, Option(
        "Most untimed batches (default: 15).", Panel.PRECISION, table="settings",
    )] = None
    """Warm-up batches at most; None for DEFAULT_MAX_WARMUP."""
    ci_width: Annotated[float | None, Option(
        "Stop when every interval is within +- this much, e.g. 0.5% (default: 1%, without another "
        "of these flags or --batches, on a GPU).", Panel.PRECISION, written=str,
        read=parse_half_width, table="settings",
    )] = None
    """Half-width of every ratio's interval at which to stop, as a fraction."""
    max_blocks: Annotated[int | None, Option(
        "Most timed blocks, with --ci-width or --time-budget (default: 200).", Panel.PRECISION,
        table="settings",
    )] = None
    """Timed blocks at most; None for MAX_BLOCKS."""
    time_budget_s: Annotated[float | None, Option(
        "Time of the run without the engine's start, e.g. 5m (default, as above: 120s).",
        Panel.PRECISION, name="time_budget",
        written=str, read=parse_seconds, table="settings",
    )] = None
    """Seconds after the engine's start; no block may end later."""
    dtype: Annotated[Dtype | None, Option(
        "auto, bfloat16, float16 or float32 (default: the pair's).", Panel.VLLM,
        axis=Axis(4, "{}", "{}", is_slow=True), engine_argument="dtype",
    )] = None
    """vLLM's dtype; None for the pair's."""
    tensor_parallel_size: Annotated[int, Option(
        "Ranks that share the target.", Panel.VLLM, table="settings",
        engine_argument="tensor_parallel_size", compare=Compare.REFUSE,
    ), Ge(1)] = 1
    speculative_config: Annotated[dict[str, Any] | None, Option(
        "vLLM's JSON, on top of the pair's.", Panel.VLLM, engine_argument="speculative_config",
        table="settings", compare=Compare.REFUSE,
    )] = None
    engine_args: Annotated[dict[str, Any], Option(
        "More arguments of vLLM's LLM(), as JSON.", Panel.VLLM, table="settings",
        compare=Compare.REFUSE,
    )] = field(default_factory=dict)
    lora: Annotated[str | None, Option(
        "A LoRA adapter's folder; every request uses it.", Panel.VLLM, table="settings",
        engine_argument="enable_lora", compare=Compare.REFUSE,
    )] = None
    """The adapter's folder; None for the model as it is."""
    against: Annotated[dict[str, Any] | None, Option(
        "Compare with a second engine that has these arguments too, as JSON: speculative_config "
        "and VLLM_... variables too; NWOR is off.",
        Panel.VLLM, table="settings", compare=Compare.REFUSE,
    )] = None
    """Arguments of vLLM's LLM() and its environment variables that only the second engine has;
    None for one engine."""
    counters: Annotated[Counters | None, Option(
        "dram: DRAM bytes per window, in untimed blocks (GPU).",
        Panel.PROFILING, table="settings",
    )] = None
    """What to count in untimed blocks."""
    # fmt: on

    @property
    def experiment(self) -> Experiment:
        """What the run compares."""
        return experiment_of(self)

    @property
    def engine_specs(self) -> "dict[Arm | None, RunSpec]":
        """The configurations of the run's engines by arm, None being the baseline's, A/A last."""
        return self.experiment.engine_specs(self)

    @property
    def drafting_arms(self) -> Mapping[str, MethodArm]:
        """What arms draft with that is not the pair's, by `engine_name`."""
        config = (self.against or {}).get(SPECULATION, {})
        if config.keys() & {METHOD, MODEL}:
            return {str(Arguments.of(self.against or {})): config}
        return self.arms or {}

    @property
    def stages(self) -> bool:
        """True if mode stage is among the modes."""
        return NworMode.STAGE in self.nwor_modes

    @property
    def stopping(self) -> StoppingRule:
        """How many timed blocks to run."""
        blocks = self.scenario.batches
        if self.ci_width is None and self.time_budget_s is None:
            return StoppingRule(blocks, blocks)
        most = self.max_blocks or max(blocks, MAX_BLOCKS)
        return StoppingRule(blocks, most, self.ci_width, self.time_budget_s)

    @property
    def checks_only(self) -> bool:
        """True if nothing is timed: the run ends with the gate."""
        return self.scenario.batches == 0

    @property
    def warmup_batches(self) -> tuple[int, int]:
        """Warm-up batches, at least and at most: in between, until their times are steady.

        Neighbouring windows are compared steady or not: their warm-up is the least, and the gate.
        """
        if self.checks_only:
            return 0, 0
        least = self.scenario.warmup
        if self.max_warmup is not None:
            return least, self.max_warmup
        if self.interleave is Interleave.WINDOWS:
            return least, least
        return least, max(least, DEFAULT_MAX_WARMUP)

    @property
    def counted_blocks(self) -> int:
        """Blocks that run once more, untimed, to count DRAM bytes: as many as are timed."""
        return self.scenario.batches if self.counters is Counters.DRAM else 0

    @property
    def worker_variables(self) -> dict[str, str]:
        """Settings of the run for the plugin in vLLM's workers, as environment variables."""
        is_stock = self.experiment.compares_drafts and not self.stages
        attention = "stock" if is_stock else "reference"
        variables = {"VLLM_NWOR_CPU_ATTENTION": attention}
        if one_slot(self.engine_args.get(ADDITIONAL)):
            variables["VLLM_NWOR_MODE"] = "stage"
        variables |= variables_of(self.engine_args)
        return variables | {
            entry.option.worker_variable: str(getattr(self, entry.field))
            for entry in declared(RunSpec)
            if entry.option.worker_variable is not None
        }

    def value_of(self, asked: Declared) -> Any:
        """The value of an option that this run has."""
        if asked.option.entry is not None:
            holder, key = asked.option.entry
            return (getattr(self, holder) or {}).get(key)
        return getattr(self.scenario if asked.holder is ScenarioValues else self, asked.field)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        plain = {f.name: to_plain(getattr(self, f.name)) for f in fields(self)}
        return {**plain, "scenario": self.scenario.model_dump(mode="json")}


def variables_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """vLLM's environment variables among an engine's arguments; true is 1."""
    found = {name: value for name, value in arguments.items() if name.startswith("VLLM_")}
    return {name: str(int(v) if isinstance(v, bool) else v) for name, v in found.items()}


ACCEPTANCE_LENGTH = "synthetic_acceptance_length"


class VllmEntries:
    """Entries of vLLM's JSON that have a name of their own in flags and sweep files."""

    # fmt: off
    cache_dtype: Annotated[CacheDtype, Option(
        "vLLM's kv_cache_dtype.", Panel.VLLM, aliases=("--kv-cache-dtype",),
        axis=Axis(5, "{} cache", "kv{}"), entry=("engine_args", "kv_cache_dtype"),
    )]
    acceptance_length: Annotated[float, Option(
        "Accept this many tokens per window on average, synthetically (GPU).", Panel.VLLM,
        axis=Axis(6, "acceptance length {:g}", "a{:g}"),
        entry=("speculative_config", ACCEPTANCE_LENGTH),
    )]
    acceptance_rates: Annotated[list[float], Option(
        "Accept draft j in this share of windows, synthetically: one number a draft (GPU).",
        has_flag=False, table="settings", entry=("speculative_config", ACCEPTANCE_RATES),
    )]
    block_size: Annotated[int, Option(
        "Tokens per cache block.", has_flag=False, table="settings",
        entry=("engine_args", "block_size"),
    ), Ge(1)]
    kv_cache_gib: Annotated[int, Option(
        "KV-cache size (default: what the requests need).", has_flag=False, written=float,
        read=bytes_of_gib, table="settings", entry=("engine_args", "kv_cache_memory_bytes"),
    )]
    # fmt: on


AXES = axes_of(ScenarioValues, RunSpec, VllmEntries)
"""The options that sweep files vary, in the order of labels, folder names and tables."""
