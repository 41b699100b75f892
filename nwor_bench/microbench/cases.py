"""The cases of `nwor-bench kernels`: kernels, their peers and windows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from nwor_bench.errors import ConfigError
from nwor_bench.workload.options import fraction

OURS = "nwor"
PEER = {
    "commit": "vllm_cuda",
    "verify_attention": "flash_attention_3",
    "gated_delta": "vllm_triton",
}
"""Each kernel's peer. vLLM writes one layer's cache per call, so a commit is compared with one
write per layer."""

ON_A_GPU = "run it on a machine with an NVIDIA GPU, set up by `make venv DEVICE=cuda`"

Kernel = Literal["commit", "verify_attention", "gated_delta"]
CacheDtype = Literal["bf16", "fp8"]

STATE_DTYPES = ("f32", "bf16")
"""Of recurrent states; vLLM's `--mamba-ssm-cache-dtype`."""


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


@dataclass(frozen=True)
class Shape:
    """Attention layers of a target model, and the block size of its cache."""

    layers: int = 28
    heads: int = 24
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V in one layer, in bf16."""
        return self.kv_heads * 2 * self.head_dim * 2


@dataclass(frozen=True)
class Nets:
    """Gated delta nets of a target model; the default is Qwen3-Next's."""

    layers: int = 36
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128

    @property
    def width(self) -> int:
        """Columns of a token behind the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


NETS = Nets()


@dataclass(frozen=True)
class Group:
    """One set of inputs.

    Attributes:
        cache_dtype: bf16 or fp8; f32 or bf16 for the states of gated delta nets.
        acceptance: accepted drafts over drafts; None if the kernel's work does not depend on it.
        context: committed tokens per request; attention only.
        heads: of the layer; attention only.
    """

    kernel: str
    cache_dtype: str
    window: Window
    acceptance: float | None = None
    context: int | None = None
    heads: Heads | None = None

    def shape(self, of_run: Shape) -> Shape:
        """The run's, with the group's heads if it has its own."""
        if self.heads is None:
            return of_run
        return replace(of_run, heads=self.heads.query, kv_heads=self.heads.kv)

    @property
    def accepted(self) -> int:
        """Accepted tokens, at least one; all of the window's if acceptance is None."""
        if self.acceptance is None:
            return self.window.tokens
        return max(1, round(self.acceptance * self.window.tokens))

    @property
    def label(self) -> str:
        """`commit 8x4 bf16, acceptance 0.5`, `verify_attention 8x4 bf16, context 1024, 24/8`."""
        more = [] if self.acceptance is None else [f"acceptance {self.acceptance:g}"]
        more += [] if self.context is None else [f"context {self.context}"]
        more += [] if self.heads is None else [str(self.heads)]
        return ", ".join([f"{self.kernel} {self.window} {self.cache_dtype}", *more])


@dataclass(frozen=True)
class Spec:
    """The options of one `nwor-bench kernels` run."""

    kernels: tuple[Kernel, ...] = ("commit", "verify_attention")
    windows: tuple[Window, ...] = (Window(8, 4), Window(64, 4), Window(64, 8), Window(256, 8))
    acceptances: tuple[float, ...] = (0.1, 0.5, 0.9)
    contexts: tuple[int, ...] = (1024,)
    cache_dtypes: tuple[CacheDtype, ...] = get_args(CacheDtype)
    heads: tuple[Heads, ...] = (Heads(24, 8), Heads(32, 4))
    """For attention, whose peers are closer the more query heads a K/V head has."""
    shape: Shape = Shape()
    """A commit takes its heads from here."""
    max_rounds: int = 30
    ci_width: float = 0.01
    seed: int = 0


def expand(spec: Spec) -> list[Group]:
    """All groups, kernel by kernel in the given order."""
    groups = []
    for kernel in spec.kernels:
        nothing: Sequence[None] = (None,)
        attends = kernel == "verify_attention"
        acceptances = spec.acceptances if kernel == "commit" else nothing
        contexts = spec.contexts if attends else nothing
        heads = spec.heads if attends else nothing
        dtypes = STATE_DTYPES if kernel == "gated_delta" else spec.cache_dtypes
        groups += [
            Group(kernel, dtype, window, acceptance, context, each)
            for dtype, each, window, acceptance, context in product(
                dtypes, heads, spec.windows, acceptances, contexts
            )
        ]
    return groups


def bytes_moved(group: Group, shape: Shape) -> int:
    """Bytes that one call must read and write, each counted once.

    - commit: reads the accepted rows in bf16, writes them in the cache's dtype.
    - verify_attention: reads context and window; queries and outputs are not counted.
    - gated_delta: `net_bytes` with one state written.
    """
    if group.kernel == "gated_delta":
        return net_bytes(group, NETS, states_written=1)
    cache_bytes = shape.row_bytes if group.cache_dtype == "bf16" else shape.row_bytes // 2
    if group.kernel == "commit":
        return shape.layers * group.accepted * (shape.row_bytes + cache_bytes)
    rows = group.window.requests * (group.window.drafts + 1)
    return group.window.requests * (group.context or 0) * cache_bytes + rows * shape.row_bytes


def net_bytes(group: Group, nets: Nets, states_written: int) -> int:
    """Bytes of a window of gated delta nets: one state read, some written, inputs and outputs."""
    tokens = group.window.tokens + group.window.requests
    values = nets.value_heads * nets.value_dim
    state = values * nets.key_dim * (4 if group.cache_dtype == "f32" else 2)
    states = group.window.requests * (1 + states_written) * state
    return nets.layers * (states + tokens * 2 * (nets.width + values))


def parse_windows(text: str) -> tuple[Window, ...]:
    """Parse `8x4,64x8` (requests x drafts). Raises ConfigError."""
    return tuple(_window(part) for part in _parts("--windows", text))


def _window(text: str) -> Window:
    numbers = text.lower().split("x")
    if len(numbers) != 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ConfigError.for_field("--windows", text, "write requests x drafts such as 8x4,64x8")
    window = Window(*map(int, numbers))
    if window.drafts > 15:
        raise ConfigError.for_field("--windows", text, "write at most 15 drafts a request")
    return window


def parse_heads(text: str) -> tuple[Heads, ...]:
    """Parse `24/8,32/4` (query heads / K/V heads). Raises ConfigError."""
    return tuple(_heads(part) for part in _parts("--heads", text))


def _heads(text: str) -> Heads:
    numbers = text.split("/")
    if len(numbers) == 2 and all(n.isdecimal() and int(n) > 0 for n in numbers):
        heads = Heads(*map(int, numbers))
        if heads.query % heads.kv == 0:
            return heads
    remedy = "write query heads / K/V heads, the first a multiple of the second, such as 24/8,32/4"
    raise ConfigError.for_field("--heads", text, remedy)


def parse_acceptances(text: str) -> tuple[float, ...]:
    """Parse fractions above 0 and up to 1, as `0.1,50%`. Raises ConfigError."""
    read = [fraction(part) for part in _parts("--acceptance", text)]
    values = tuple(value for value in read if value is not None and 0 < value <= 1)
    if not values or len(values) < len(read):
        raise ConfigError.for_field("--acceptance", text, "write fractions such as 0.1,50%,0.9")
    return values


def _parts(flag: str, text: str) -> tuple[str, ...]:
    """The distinct parts between commas, in order. Raises ConfigError if there are none."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ConfigError.for_field(flag, text, "name at least one; separate several by commas")
    return parts
