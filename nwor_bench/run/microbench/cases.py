"""The cases of `nwor-bench kernels`: kernels, windows and shapes. Loads no torch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Literal

from annotated_types import Ge

from nwor_bench.errors import ConfigError
from nwor_bench.workload.options import Option, Panel, ValueCheck, fraction
from nwor_bench.workload.stopping import parse_fraction

OURS = "nwor"
PEER = {
    "commit": "vllm_cuda",
    "verify_attention": "flash_attention_3",
    "gated_delta": "vllm_triton",
}
"""The peer of each kernel that the headline compares; backends of `attention` have none."""

ONE_ROW = ", 1 row"
"""What the name of a contender ends with that has one query row, as without drafts."""

ON_A_GPU = "run it on a machine with an NVIDIA GPU, set up by `make venv DEVICE=cuda`"

CONTEXTS = (256, 1024, 4096, 8192, 32768)
"""Contexts of `attention`, if none are given."""

Kernel = Literal["commit", "verify_attention", "attention", "gated_delta"]
CacheDtype = Literal["bf16", "fp8"]

STATE_DTYPES = ("f32", "bf16")
"""Dtypes of recurrent states; vLLM's `--mamba-ssm-cache-dtype`."""


@dataclass(frozen=True)
class Window:
    """Requests in a step, and drafts per request."""

    requests: int
    drafts: int

    @property
    def tokens(self) -> int:
        """Staged tokens of the window."""
        return self.requests * self.drafts

    def __str__(self) -> str:
        return f"{self.requests}x{self.drafts}"


@dataclass(frozen=True)
class Heads:
    """Query and K/V heads of an attention layer."""

    query: int
    kv: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}"


def _one_of(*known: int) -> ValueCheck:
    listed = f"{', '.join(map(str, known[:-1]))} or {known[-1]}"
    return lambda value: None if value in known else f"write {listed}"


@dataclass(frozen=True)
class Shape:
    """Attention layers of a target model, and the block size of its cache."""

    # fmt: off
    layers: Annotated[int, Option("Target layers.", Panel.SHAPE), Ge(1)] = 28
    heads: int = 24
    kv_heads: int = 8
    head_dim: Annotated[int, Option(
        "Head dimension.", Panel.SHAPE, check=_one_of(64, 96, 128, 256),
    )] = 128
    block_size: Annotated[int, Option(
        "Tokens per cache block.", Panel.SHAPE, check=_one_of(16, 32, 64, 128),
    )] = 16
    # fmt: on


@dataclass(frozen=True)
class Nets:
    """Gated delta nets of a target model; the default is Qwen3-Next's."""

    layers: int = 36
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128


NETS = Nets()


@dataclass(frozen=True)
class InputGroup:
    """One set of inputs; None for what the kernel's work does not depend on."""

    kernel: Kernel
    cache_dtype: str
    """bf16 or fp8; f32 or bf16 for the states of gated delta nets."""
    window: Window
    acceptance: float | None = None
    context: int | None = None
    heads: Heads | None = None

    def shape(self, of_run: Shape) -> Shape:
        """The run's shape, with the group's heads if it has its own."""
        if self.heads is None:
            return of_run
        return replace(of_run, heads=self.heads.query, kv_heads=self.heads.kv)

    @property
    def accepted(self) -> int:
        """Accepted tokens, at least one; all of the window's if acceptance is None."""
        share = 1.0 if self.acceptance is None else self.acceptance
        return max(1, round(share * self.window.tokens))


def parse_windows(flag: str, text: str) -> tuple[Window, ...]:
    """Parse `8x4,64x8` (requests x drafts). Raises ConfigError."""
    remedy = "write requests x drafts such as 8x4,64x8, at most 15 drafts a request"
    pairs = _pairs(flag, text.lower(), "x", remedy, lambda _, drafts: drafts <= 15)
    return tuple(Window(*pair) for pair in pairs)


def parse_heads(flag: str, text: str) -> tuple[Heads, ...]:
    """Parse `24/8,32/4` (query heads / K/V heads). Raises ConfigError."""
    remedy = "write query heads / K/V heads, the first a multiple of the second, such as 24/8,32/4"
    pairs = _pairs(flag, text, "/", remedy, lambda query, kv: query % kv == 0)
    return tuple(Heads(*pair) for pair in pairs)


def parse_acceptances(flag: str, text: str) -> tuple[float, ...]:
    """Parse fractions above 0 and up to 1, as `0.1,50%`. Raises ConfigError."""
    values = [fraction(part) or 0 for part in _parts(text)]
    if not values or not all(0 < value <= 1 for value in values):
        raise ConfigError.for_field(flag, text, "write fractions such as 0.1,50%,0.9")
    return tuple(values)


def _parts(text: str) -> list[str]:
    """The distinct parts between commas, in order."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _pairs(
    flag: str, text: str, joint: str, remedy: str, fits: Callable[[int, int], bool]
) -> list[tuple[int, int]]:
    matches = [re.fullmatch(f"([1-9][0-9]*){joint}([1-9][0-9]*)", part) for part in _parts(text)]
    pairs = [(int(match[1]), int(match[2])) for match in matches if match]
    if not pairs or len(pairs) < len(matches) or not all(fits(*pair) for pair in pairs):
        raise ConfigError.for_field(flag, text, remedy)
    return pairs


@dataclass(frozen=True)
class Spec:
    """The options of one `nwor-bench kernels` run."""

    # fmt: off
    kernels: Annotated[tuple[Kernel, ...], Option(
        "Some of commit, verify_attention, attention, gated_delta.", Panel.WORK,
    )] = ("commit", "verify_attention")
    windows: Annotated[tuple[Window, ...], Option(
        "Requests x drafts.", Panel.WORK, read=parse_windows,
    )] = (Window(8, 4), Window(64, 4), Window(64, 8), Window(256, 8))
    acceptances: Annotated[tuple[float, ...], Option(
        "Accepted drafts over drafts; for commit.", Panel.WORK, "acceptance",
        read=parse_acceptances,
    )] = (0.1, 0.5, 0.9)
    contexts: Annotated[tuple[Annotated[int, Ge(1)], ...] | None, Option(
        "Cached tokens a request (default: 1024; attention: 256 to 32768).", Panel.WORK, "context",
    )] = None
    cache_dtypes: Annotated[tuple[CacheDtype, ...], Option(
        "bf16, fp8.", Panel.WORK, "cache_dtype",
    )] = ("bf16", "fp8")
    heads: Annotated[tuple[Heads, ...], Option(
        "Query heads / K/V heads; a commit has the first ones.", Panel.SHAPE, read=parse_heads,
    )] = (Heads(24, 8), Heads(32, 4))
    """For attention, whose peers are closer the more query heads a K/V head has."""
    shape: Shape = Shape()
    """A commit takes its heads from here."""
    max_rounds: Annotated[int, Option(
        "Most rounds of a case.", Panel.PRECISION, "rounds",
    ), Ge(3)] = 30
    ci_width: Annotated[float, Option(
        "Stop a case when each ratio is known to +- this much (default: 1%).", Panel.PRECISION,
        written=str, read=parse_fraction,
    )] = 0.01
    seed: Annotated[int, Option("Seed of inputs and order.")] = 0
    # fmt: on


def expand(spec: Spec) -> list[InputGroup]:
    """All groups, kernel by kernel in the given order."""
    none: Sequence[None] = (None,)
    groups: list[InputGroup] = []
    for kernel in spec.kernels:
        dtypes = STATE_DTYPES if kernel == "gated_delta" else spec.cache_dtypes
        usual = {"verify_attention": (1024,), "attention": CONTEXTS}.get(kernel)
        heads, contexts = (spec.heads, spec.contexts or usual) if usual else (none, none)
        acceptances = spec.acceptances if kernel == "commit" else none
        groups += [
            InputGroup(kernel, dtype, window, acceptance, context, head_counts)
            for dtype, head_counts, window, acceptance, context in product(
                dtypes, heads, spec.windows, acceptances, contexts
            )
        ]
    return groups
