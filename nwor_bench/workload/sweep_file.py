"""Sweeps as files: what varies (axes) and what all runs share (settings), in TOML. Pure."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import NworMode, ScvMode, StageBy, StageL2
from nwor_bench.workload.resources import resource_dir
from nwor_bench.workload.run_spec import DEFAULT_PAIR
from nwor_bench.workload.toml_file import StrictModel, read_toml

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

CacheDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head",
    "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
]  # fmt: skip
"""vLLM's kv_cache_dtype, auto being the model's; importing it from vLLM would take seconds."""


class Axes(StrictModel):
    """What varies. Every combination is a run; the modes are the cells of each run.

    An axis that is left out has one value: the scenario's, the pair's, or the default.
    """

    pairs: tuple[str, ...] = Field(default=(DEFAULT_PAIR,), min_length=1)
    scenarios: tuple[str, ...] = Field(default=("short",), min_length=1)
    draft_tokens: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    temperature: tuple[float, ...] = ()
    dtype: tuple[Dtype, ...] = ()
    cache_dtype: tuple[CacheDtype, ...] = ()
    acceptance_length: tuple[float, ...] = ()
    """For pairs that accept drafts by the dice: tokens that a request gains a window."""
    nwor_modes: tuple[NworMode, ...] = tuple(NworMode)
    scv_modes: tuple[ScvMode, ...] = tuple(ScvMode)

    @field_validator("*")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError("write each value once")
        return values


class Settings(StrictModel):
    """What all runs share; the names and values are those of `nwor-bench sweep`'s flags."""

    batches: int | None = None
    warmup: int | None = None
    max_warmup: int | None = None
    max_new_tokens: int | None = None
    max_model_len: int | None = None
    ci_width: str | None = None
    max_blocks: int | None = None
    time_budget: str | None = None
    seed: int | None = None
    block_size: int | None = None
    kv_cache_gib: float | None = None
    tensor_parallel_size: int = 1
    dram_counters: bool = False
    launch_counts: bool = False
    stage_by: StageBy = StageBy.REFERENCE
    stage_l2: StageL2 = StageL2.NORMAL
    engine_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_profiler(self) -> Self:
        if self.dram_counters and self.launch_counts:
            raise ValueError(
                "write dram_counters or launch_counts, not both: PyTorch's profiler, which counts "
                "launches, changes the clock of the counters in every later run of the process"
            )
        return self


class SweepFile(StrictModel):
    """One sweeps/NAME.toml."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    description: str = ""
    axes: Axes = Axes()
    settings: Settings = Settings()


def load_sweep(path: Path) -> SweepFile:
    """Read a sweep file; a shipped one by its name alone too.

    Raises ConfigError naming file, line and field of all that is wrong in it.
    """
    if path == Path():
        raise ConfigError.for_field("--file", "", "name a sweep file, such as quick or my.toml")
    shipped = resource_dir("sweeps")
    if path.suffix != ".toml":
        names = sorted(file.stem for file in shipped.glob("*.toml"))
        if str(path) not in names:
            raise ConfigError.unknown("--file", str(path), names)
        path = shipped / f"{path}.toml"
    sweep = read_toml(path, SweepFile)
    return sweep.model_copy(update={"name": sweep.name or path.stem})
