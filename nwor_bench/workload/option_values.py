"""Values that options take: cells, acceptance lengths, dtypes, counters, and their checks."""

from collections.abc import Mapping
from enum import StrEnum
from math import isfinite
from typing import Any, Literal

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.workload.options import parse_as

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

CacheDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head",
    "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
]  # fmt: skip
"""vLLM's kv_cache_dtype, auto being the model's; importing it from vLLM would take seconds."""

MOST_GIB = 1_000_000

NAMED_LENGTHS: Mapping[str, float] = {
    "deepseek-v4": 2.54,
    "glm-5.2": 3.33,
    "kimi-k2.5": 3.24,
    "kimi-k3": 3.22,
    "minimax-m3": 3.11,
    "qwen3.5": 3.97,
}
"""Mean tokens a window with NAMED_DRAFTS drafts, by the model's name."""

NAMED_DRAFTS = 4
"""Draft tokens a window for which the named lengths were measured."""


class CellName(StrEnum):
    """A cell of the grid, by its modes, as --cells names it."""

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


def added_cell(word: object) -> str | None:
    """What to write instead of a cell that is added and never chosen; None for other words."""
    if word == "off-off":
        return "off x off and its A/A arm are added by themselves; write a cell such as stage-graph"
    if isinstance(word, str) and word.startswith("control-"):
        return (
            "control x off is added by itself beside a staging cell on a GPU, and anywhere with "
            "control among the NWOR modes; write a cell such as stage-graph"
        )
    return None


def cell_words(flag: str, given: Any) -> Any:
    """The words of `flag`, as they are; raises ConfigError for a cell that is added."""
    words = parse_as(tuple[str, ...], flag, given)
    for word in words:
        if (remedy := added_cell(word)) is not None:
            raise ConfigError.for_field(flag, word, remedy)
    return words


def parse_length(flag: str, given: Any) -> float:
    """The length that a number or a name stands for. Raises ConfigError."""
    if isinstance(given, str) and given.strip().lower() in NAMED_LENGTHS:
        return NAMED_LENGTHS[given.strip().lower()]
    try:
        length = float(given)
    except ValueError:
        raise ConfigError.unknown(flag, given, list(NAMED_LENGTHS)) from None
    if not isfinite(length):
        raise ConfigError.for_field(flag, given, "write a number such as 2.6, or a name")
    return length


def check_length(flag: str, given: Any, draft_tokens: int) -> None:
    """Refuse a length that no window of so many drafts gives, and a name for other windows.

    A window gives a request from one token to all its drafts plus one. Raises ConfigError.
    """
    length = parse_length(flag, given)
    if isinstance(given, str) and given.strip().lower() in NAMED_LENGTHS:
        if draft_tokens != NAMED_DRAFTS:
            remedy = (
                f"it was measured with {NAMED_DRAFTS} draft tokens, and this run has "
                f"{draft_tokens}; write --draft-tokens {NAMED_DRAFTS}, or a number"
            )
            raise ConfigError.for_field(flag, given, remedy)
    elif not 1 <= length <= draft_tokens + 1:
        remedy = f"write 1 to {draft_tokens + 1}: what a window of {draft_tokens} drafts can give"
        raise ConfigError.for_field(flag, given, remedy)


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


def fraction_above_zero(value: float) -> str | None:
    """What to write instead of a value outside (0, 1]."""
    if value <= 0:
        return "write a number greater than 0"
    return "write 1 or less" if value > 1 else None
