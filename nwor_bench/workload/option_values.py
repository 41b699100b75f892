"""Values that options take: cells, acceptance lengths, dtypes, counters, and their checks."""

from enum import StrEnum
from typing import Literal

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import NworMode, ScvMode

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

CacheDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head",
    "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
]  # fmt: skip
"""vLLM's kv_cache_dtype, auto being the model's; importing it from vLLM would take seconds."""

MOST_GIB = 1_000_000


class CellName(StrEnum):
    """A cell of the grid, by its modes, as --cells names it. off x off, its A/A arm and the control
    are added by themselves."""

    OFF_GRAPH = "off-graph"
    OFF_ADAPTIVE = "off-adaptive"
    STAGE_OFF = "stage-off"
    STAGE_GRAPH = "stage-graph"
    STAGE_ADAPTIVE = "stage-adaptive"

    @property
    def modes(self) -> tuple[NworMode, ScvMode]:
        """Its NWOR and SCV mode."""
        nwor, scv = self.split("-")
        return NworMode(nwor), ScvMode(scv)


def includes_off(modes: tuple[str, ...]) -> str | None:
    """What to write instead of modes without off."""
    if "off" in modes:
        return None
    return f"write off,{','.join(modes)}: every cell is compared with off x off"


def bytes_of_gib(field: str, given: float) -> int:
    """Bytes of a size in GiB. Raises ConfigError if it is not positive, or too large."""
    if not 0 < given <= MOST_GIB:
        raise ConfigError.for_field(field, given, f"write more than 0, {MOST_GIB} at most")
    return int(given * 2**30)


class Counters(StrEnum):
    """What untimed blocks behind the timed ones count. One at a time: PyTorch's profiler, which
    counts launches, changes the clock of the DRAM counters in every later run of the process."""

    DRAM = "dram"
    LAUNCHES = "launches"
