"""What a sweep runs: a scenario merged with the command line by one `resolve`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import inf
from typing import Any, TypeVar

from pydantic import ValidationError

from nwor_bench.errors import ConfigError
from nwor_bench.records.json_text import parse_json
from nwor_bench.records.types import NworMode, ScvMode, StageBy, StageL2
from nwor_bench.workload.run_spec import DEFAULT_SEED, RunSpec
from nwor_bench.workload.scenario import (
    MOST_BLOCKS,
    PromptSource,
    Scenario,
    load_scenario,
    scenario_names,
)
from nwor_bench.workload.stopping import parse_fraction, parse_seconds
from nwor_bench.workload.toml_file import remedy

__all__ = [
    "Overrides",
    "PromptSource",
    "RunSpec",
    "Scenario",
    "flag_of",
    "load_scenario",
    "resolve",
    "scenario_names",
]

DEFAULT_NWOR_MODES = "off,stage"
DEFAULT_SCV_MODES = "off,graph,adaptive"

DTYPES = ("auto", "bfloat16", "float16", "float32")

_OWNED_ENGINE_ARGS = {
    "model": "use --target-model",
    "tokenizer": "it comes with --target-model",
    "speculative_config": "use --speculative-config",
    "max_model_len": "use --max-model-len",
    "tensor_parallel_size": "use --tensor-parallel-size",
    "dtype": "use --dtype",
    "block_size": "use --block-size",
    "kv_cache_memory_bytes": "use --kv-cache-gib",
    "seed": "use --seed",
    "hf_overrides": "memory and bytes are worked out from config.json; change it in a copy of the "
    "model's folder, or write a pair file",
    "worker_extension_cls": "nwor-bench sets it itself",
    "disable_log_stats": "nwor-bench reads vLLM's counters",
}
"""Engine arguments that have a flag of their own, or that the harness must set."""


@dataclass(frozen=True)
class Overrides:
    """Values from the command line; None leaves the scenario's value (or the default seed)."""

    requests: int | None = None
    batches: int | None = None
    warmup: int | None = None
    draft_tokens: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_model_len: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None

    def for_scenario(self) -> dict[str, Any]:
        """The values that were given, by the name of the scenario's field."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        given.pop("seed", None)
        return given


def resolve(
    scenario: Scenario,
    overrides: Overrides = Overrides(),
    *,
    nwor_modes: str = DEFAULT_NWOR_MODES,
    scv_modes: str = DEFAULT_SCV_MODES,
    dtype: str | None = None,
    block_size: int | None = None,
    tensor_parallel_size: int = 1,
    speculative_config: str | None = None,
    engine_args: str | None = None,
    kv_cache_gib: float | None = None,
    ci_width: str | None = None,
    max_blocks: int | None = None,
    time_budget: str | None = None,
    max_warmup: int | None = None,
    dram_counters: bool = False,
    launch_counts: bool = False,
    stage_by: str = StageBy.REFERENCE,
    stage_l2: str = StageL2.NORMAL,
) -> RunSpec:
    """Merge a scenario with the command line's values and check the whole.

    Modes are comma-separated names; `speculative_config` and `engine_args` are JSON objects
    as vLLM takes them; `ci_width` is a text such as 0.5%, `time_budget` such as 60s.
    Raises ConfigError that names the flag, the value, and what to write.
    """
    config = json_object("--speculative-config", speculative_config)
    overrides = _drafts_from(config, overrides)
    spec = RunSpec(
        scenario=_override(scenario, overrides),
        nwor_modes=_modes("--nwor-modes", nwor_modes, NworMode),
        scv_modes=_modes("--scv-modes", scv_modes, ScvMode),
        seed=DEFAULT_SEED if overrides.seed is None else overrides.seed,
        dtype=dtype,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        speculative_config=config,
        engine_args=json_object("--engine-args", engine_args) or {},
        kv_cache_gib=kv_cache_gib,
        ci_width=None if ci_width is None else parse_fraction("--ci-width", ci_width),
        max_blocks=max_blocks,
        time_budget_s=None if time_budget is None else parse_seconds("--time-budget", time_budget),
        max_warmup=max_warmup,
        dram_counters=dram_counters,
        launch_counts=launch_counts,
        stage_by=_choice("--stage-by", stage_by, StageBy),
        stage_l2=_choice("--stage-l2", stage_l2, StageL2),
    )
    _check(spec)
    return spec


def flag_of(field: str) -> str:
    """The command-line flag of a field: draft_tokens is --draft-tokens."""
    return "--" + field.replace("_", "-")


def _override(scenario: Scenario, overrides: Overrides) -> Scenario:
    try:
        return Scenario.model_validate({**dict(scenario), **overrides.for_scenario()})
    except ValidationError as error:
        faults = [
            ConfigError.for_field(flag_of(str(fault["loc"][0])), fault["input"], remedy(fault))
            for fault in error.errors()
        ]
        raise ConfigError("\n".join(map(str, faults))) from error


def _drafts_from(config: Mapping[str, Any] | None, overrides: Overrides) -> Overrides:
    """Let vLLM's num_speculative_tokens set the draft tokens, unless the flag contradicts it."""
    if config is None or "num_speculative_tokens" not in config:
        return overrides
    drafts = config["num_speculative_tokens"]
    if overrides.draft_tokens not in (None, drafts):
        raise ConfigError.for_field(
            "--draft-tokens",
            overrides.draft_tokens,
            f"--speculative-config says num_speculative_tokens {drafts!r}; give one of the two",
        )
    return replace(overrides, draft_tokens=drafts)


Mode = TypeVar("Mode", bound=StrEnum)


def _choice(flag: str, text: str, kind: type[Mode]) -> Mode:
    if text not in list(kind):
        raise ConfigError.unknown(flag, text, [word.value for word in kind])
    return kind(text)


def _modes(flag: str, text: str, kind: type[Mode]) -> tuple[Mode, ...]:
    known = [mode.value for mode in kind]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name:
            raise ConfigError.for_field(flag, text, f"write for example {','.join(known)}")
        if name not in known:
            raise ConfigError.unknown(flag, name, known)
    if len(set(names)) < len(names):
        raise ConfigError.for_field(flag, text, "write each mode once")
    if "off" not in names:
        remedy_text = f"write off,{','.join(names)}: every cell is compared with off x off"
        raise ConfigError.for_field(flag, text, remedy_text)
    return tuple(kind(name) for name in names)


def json_object(flag: str, text: str | None) -> dict[str, Any] | None:
    """The object that a flag's JSON text holds; ConfigError for any other text."""
    if text is None:
        return None
    try:
        value = parse_json(text)
    except ValueError as error:
        reason = f"it is not JSON ({error}); write an object such as '{{\"name\": 1}}'"
        raise ConfigError.for_field(flag, text, reason) from error
    if not isinstance(value, dict):
        raise ConfigError.for_field(flag, text, "write a JSON object such as '{\"name\": 1}'")
    return value


def _check(spec: RunSpec) -> None:
    """Rules that are not a scenario field's own."""
    scenario = spec.scenario
    room = scenario.max_new_tokens + scenario.draft_tokens
    if room >= scenario.max_model_len:
        raise ConfigError.for_field(
            "--max-model-len",
            scenario.max_model_len,
            f"write more than {room} (--max-new-tokens {scenario.max_new_tokens} + "
            f"--draft-tokens {scenario.draft_tokens}) so that a prompt has room too",
        )
    _check_range("--seed", spec.seed, 0 <= spec.seed < 2**32, "0 to 4294967295")
    _check_range("--tensor-parallel-size", spec.tensor_parallel_size, spec.tensor_parallel_size > 0)
    if spec.block_size is not None:
        _check_range("--block-size", spec.block_size, spec.block_size > 0)
    if spec.kv_cache_gib is not None:
        _check_range(
            "--kv-cache-gib", spec.kv_cache_gib, 0 < spec.kv_cache_gib < inf, "more than 0"
        )
    _check_amount(spec)
    if spec.dtype is not None and spec.dtype not in DTYPES:
        raise ConfigError.unknown("--dtype", spec.dtype, DTYPES)
    _check_engine_args(spec.engine_args)
    _check_staging(spec)


def _check_staging(spec: RunSpec) -> None:
    """How drafts are held: only mode `stage` holds any, and only copies can be kept in L2."""
    if spec.stage_by is not StageBy.REFERENCE and NworMode.STAGE not in spec.nwor_modes:
        remedy_text = "no cell stages; write --nwor-modes off,stage or leave it out"
        raise ConfigError.for_field("--stage-by", spec.stage_by.value, remedy_text)
    if spec.stage_l2 is StageL2.PERSIST and spec.stage_by is not StageBy.COPY:
        remedy_text = "it keeps copies in L2; write --stage-by copy too"
        raise ConfigError.for_field("--stage-l2", spec.stage_l2.value, remedy_text)


def _check_amount(spec: RunSpec) -> None:
    """How much to measure: the flags must not contradict each other."""
    batches, warmup = spec.scenario.batches, spec.scenario.warmup
    if spec.max_blocks is not None:
        if spec.ci_width is None and spec.time_budget_s is None:
            raise ConfigError.for_field(
                "--max-blocks",
                spec.max_blocks,
                "it bounds --ci-width and --time-budget; write one of them too, or --batches alone",
            )
        wanted = f"{batches} (--batches) or more"
        _check_range("--max-blocks", spec.max_blocks, spec.max_blocks >= batches, wanted)
        most = spec.max_blocks <= MOST_BLOCKS
        _check_range("--max-blocks", spec.max_blocks, most, f"{MOST_BLOCKS} or less")
    if spec.max_warmup is not None:
        wanted = f"{warmup} (--warmup) or more"
        _check_range("--max-warmup", spec.max_warmup, spec.max_warmup >= warmup, wanted)


def _check_range(flag: str, value: float, is_fine: bool, wanted: str = "1 or more") -> None:
    if not is_fine:
        raise ConfigError.for_field(flag, value, f"write {wanted}")


def _check_engine_args(names: Iterable[str]) -> None:
    for name in names:
        if "-" in name:
            fixed = name.lstrip("-").replace("-", "_")
            raise ConfigError.for_field("--engine-args", name, f"write {fixed!r}, as vLLM's LLM()")
        if name in _OWNED_ENGINE_ARGS:
            raise ConfigError.for_field("--engine-args", name, _OWNED_ENGINE_ARGS[name])
