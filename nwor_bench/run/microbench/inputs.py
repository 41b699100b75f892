"""Inputs of each kernel laid out as in an engine, and checks of results against the references.

Tensors are made on PyTorch's default device from its seed. `check` makes a call on poisoned
outputs; it returns the fault, or an empty string.
"""

from collections.abc import Callable, Iterable
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from nwor_bench.run.microbench.cases import NETS, OURS, InputGroup, Shape
from nwor_kernels.attention_step import AttentionStep, Scales, ScoreRules, StepRequests
from nwor_kernels.commit.reference import LayerCaches, commit_windows_reference
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.gated_delta.records import GatedNorm, WindowInputs, allocate_records
from nwor_kernels.gated_delta.reference import verify_window_reference
from nwor_kernels.verify_attention.reference import verify_attention_varlen_reference

Call = Callable[[], object]

STAGED, MERGE = f"{OURS}_staged", f"{OURS}_merge"
"""Our two ways to attend a staged window, beside vLLM's backends."""

COMMIT_SCALE, ATTENTION_SCALE = 0.37, 0.02
"""Scales of fp8 caches. With the first, some random values saturate e4m3."""

MAX_SEQ_LEN = 16_384
"""Smallest maximum length that graphs are captured for; the timed lengths are shorter."""

ATTENTION_ERROR = {"bf16": 1e-2, "fp8": 6e-2}
"""With an fp8 cache FlashAttention rounds its weights to e4m3."""

OUT_ERROR, STATE_ERROR = 2e-2, {"f32": 1e-6, "bf16": 1e-2}
"""Tolerance of gated delta nets: outputs are rounded to bfloat16, a bfloat16 state once."""


def poison(tensors: Iterable[Tensor]) -> None:
    """Fill with NaN; e4m3's in tensors of bytes."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)


def fault_of(name: str, error: Tensor, allowed: float) -> str:
    """A sentence if the error of a result is more than allowed, or NaN; else an empty string."""
    value = float(error)
    return "" if value <= allowed else f"{name}: error {value:.1e}, more than {allowed:g}"


class KvInputs:
    """The newest `rows` tokens of each request, in fused QKV outputs, and their slots in caches."""

    MAX_SETS = 32
    """Sets of inputs that a graph's calls have at most."""

    def __init__(self, group: InputGroup, shape: Shape, layers: int, rows: int, first: Tensor):
        self.group, self.shape, self.rows = group, shape, rows
        self.fp8, self.requests = group.cache_dtype == "fp8", group.window.requests
        heads = shape.heads + 2 * shape.kv_heads
        self.fused = torch.randn(layers, self.requests * rows, heads, shape.head_dim).bfloat16()
        self.queries, self.keys, self.values = self.split(self.fused)
        position = first[:, None] + torch.arange(rows)
        blocks = -(-(int(position.max()) + 1) // shape.block_size)
        self.table = torch.randperm(self.requests * blocks).view(self.requests, blocks)
        block = self.table.gather(1, position // shape.block_size)
        self.slots = (block * shape.block_size + position % shape.block_size).flatten()
        self.sizes = (self.table.numel(), shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        self.row_bytes = shape.kv_heads * 2 * shape.head_dim * 2
        self.cached_bytes = self.row_bytes // (2 if self.fp8 else 1)

    def split(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Q, K and V of fused rows, as views."""
        return torch.split(fused, [self.shape.heads] + 2 * [self.shape.kv_heads], dim=2)


class Commit(KvInputs):
    """A window in every layer; requests start anywhere in a block, some tokens are accepted."""

    def __init__(self, group: InputGroup, shape: Shape):
        window = group.window
        first = torch.randint(shape.block_size, (window.requests,))
        super().__init__(group, shape, shape.layers, window.drafts, first)
        requests = torch.randperm(window.tokens)[: group.accepted] // window.drafts
        self.counts = torch.bincount(requests, minlength=window.requests).int()
        self.accepted = (torch.arange(window.drafts) < self.counts[:, None]).flatten()
        dtype = torch.uint8 if self.fp8 else torch.bfloat16
        self.caches = [torch.empty(self.sizes, dtype=dtype) for _ in range(shape.layers)]
        self.scale = torch.full((1,), COMMIT_SCALE)
        self.scales = [self.scale] * shape.layers if self.fp8 else None
        self.errors = torch.zeros(shape.layers, dtype=torch.int32)

    def bytes_moved(self, name: str) -> int:
        """Accepted rows, read in bf16 and written in the cache's dtype."""
        return self.shape.layers * self.group.accepted * (self.row_bytes + self.cached_bytes)

    @cached_property
    def wanted(self) -> list[Tensor]:
        """The caches after the reference's commit."""
        poison(self.caches)
        caches = [cache.clone() for cache in self.caches]
        commit_windows_reference(
            (list(self.keys), list(self.values)), LayerCaches(caches, self.scales, self.scales),
            self.slots, self.accepted, torch.zeros_like(self.errors),
        )  # fmt: skip
        return caches

    def check(self, call: Call, name: str) -> str:
        """Every byte of the caches counts, and what is not accepted stays poisoned."""
        wanted = self.wanted
        poison(self.caches)
        call()
        if bool(self.errors.any()):
            return "the kernel set an error flag"
        for layer, pair in enumerate(zip(self.caches, wanted, strict=True)):
            actual, expected = (cache.view(torch.uint8) for cache in pair)
            if not torch.equal(actual, expected):
                number = int((actual != expected).sum())
                return f"layer {layer}: {number} bytes differ from the reference"
        return ""


class Attention(KvInputs):
    """A step of one layer. The cache holds every token, the window included."""

    def __init__(self, group: InputGroup, shape: Shape):
        rows, self.context = group.window.drafts + 1, group.context or 0
        super().__init__(group, shape, 1, rows, torch.full((group.window.requests,), self.context))
        self.max_seq_len = max(MAX_SEQ_LEN, self.context + rows)
        self.scale = torch.full((1,), ATTENTION_SCALE) if self.fp8 else None
        query, self.key, self.value = self.queries[0], self.keys[0], self.values[0]
        self.query = self._quantised(query)
        cache = torch.randn(self.sizes, dtype=torch.bfloat16)
        self.cache = cache if self.scale is None else (cache / self.scale).to(torch.float8_e4m3fn)
        self.table = self.table.int()
        self.starts = torch.arange(self.requests + 1, dtype=torch.int32) * rows
        self.seq_lens = torch.full((self.requests,), self.context + rows, dtype=torch.int32)
        self.output = torch.empty(self.query.shape, dtype=torch.bfloat16)
        self.write_window()

    def bytes_moved(self, name: str) -> int:
        """Context and window; queries and outputs are not counted."""
        window = self.requests * self.rows * self.row_bytes
        return self.requests * self.context * self.cached_bytes + window

    def _quantised(self, values: Tensor) -> Tensor:
        return values if self.scale is None else quantize_e4m3(values, self.scale)

    @property
    def step(self) -> AttentionStep:
        """What our kernels and their references are given."""
        starts, rules = self.starts, ScoreRules(self.shape.head_dim**-0.5)
        requests = StepRequests(starts, self.seq_lens, self.table, starts[:-1], starts[1:])
        return AttentionStep(
            self.query, self.key, self.value, self.cache, requests, self.output, rules, self.rows,
            self.max_seq_len, Scales(self.scale, self.scale, self.scale),
        )  # fmt: skip

    def one_row(self) -> "Attention":
        """The same requests and cache without drafts: the first row of each window."""
        one, number = copy(self), self.requests
        one.rows, one.starts = 1, torch.arange(number + 1, dtype=torch.int32)
        one.query, one.key, one.value = (
            tensor[:: self.rows].contiguous() for tensor in (self.query, self.key, self.value)
        )
        one.slots, one.seq_lens = self.slots[:: self.rows], self.seq_lens - self.rows + 1
        one.output = torch.empty_like(self.output[:number])
        return one

    @cached_property
    def wanted(self) -> Tensor:
        """The reference's result, in float64."""
        output = torch.empty_like(self.output, dtype=torch.float64)
        verify_attention_varlen_reference(self.step._replace(output=output), torch.float64)
        return output

    def write_window(self, instead: float | None = None) -> None:
        """Write the window's K/V into the cache, as a stock write does, or a number instead."""
        rows = torch.cat([self.key, self.value], dim=-1)
        rows = self._quantised(rows if instead is None else torch.full_like(rows, instead))
        block, offset = self.slots // self.shape.block_size, self.slots % self.shape.block_size
        self.cache.transpose(1, 2).view(torch.uint8)[block, offset] = rows.view(torch.uint8)

    def check(self, call: Call, name: str) -> str:
        """Our kernels must not read the window from the cache, where something else stands.

        FlashAttention, and so the merge, multiplies rows that it does not see by 0.
        """
        wanted, unseen = self.wanted, {OURS: float("nan"), STAGED: float("nan"), MERGE: 100.0}
        self.write_window(unseen.get(name))
        poison([self.output])
        call()
        self.write_window()
        error = (self.output.double() - wanted).norm() / wanted.norm()
        return fault_of("outputs", error, ATTENTION_ERROR[self.group.cache_dtype])


class NetWindow:
    """A window in all gated delta nets; every request reads its state from a random slot."""

    MAX_SETS = 1

    def __init__(self, group: InputGroup, shape: Shape):
        self.group, self.nets, nets = group, NETS, NETS
        requests, self.window = group.window.requests, group.window.drafts + 1
        tokens, layers = requests * self.window, nets.layers
        heads = (tokens, nets.value_heads)
        width = 2 * nets.key_heads * nets.key_dim + nets.value_heads * nets.value_dim
        mixed = torch.randn(layers, tokens, width).bfloat16()
        a, b = torch.randn(2, layers, *heads).bfloat16()
        decay = torch.randn(layers, nets.value_heads).sigmoid().mul(2).log()
        bias = torch.randn(layers, nets.value_heads).bfloat16()
        gate, weight = torch.randn(*heads, nets.value_dim), torch.randn(nets.value_dim)
        self.norm = GatedNorm(gate.bfloat16(), weight.bfloat16(), 1e-6)
        self.table = (torch.randperm(tokens).int() + 1).view(requests, self.window)
        self.accepted, self.committed = torch.randint(1, self.window + 1, (2, requests)).int()
        starts = torch.arange(requests + 1, dtype=torch.int32) * self.window
        sizes = (tokens + 1, nets.value_heads, nets.value_dim, nets.key_dim)
        dtype = torch.float32 if group.cache_dtype == "f32" else torch.bfloat16
        self.states = [torch.randn(sizes, dtype=dtype) for _ in range(layers)]
        self.inputs = [
            WindowInputs._make((*of_layer, self.table, self.accepted, starts))
            for of_layer in zip(mixed, a, b, decay, bias, self.states, strict=True)
        ]
        self.out = torch.empty(*heads, nets.value_dim, dtype=torch.bfloat16)
        self.records = allocate_records(
            (layers, requests, self.window), key_heads=nets.key_heads,
            value_heads=nets.value_heads, key_dim=nets.key_dim, value_dim=nets.value_dim,
            dtype=torch.bfloat16, device=self.out.device,
        )  # fmt: skip
        self._first = self.states[-1].clone()

    def bytes_moved(self, name: str) -> int:
        """One state read, the states written, inputs and outputs."""
        written = 1 if name.startswith(OURS) else self.window
        slots = self.group.window.requests * (1 + written)
        inputs = self.inputs[0]
        layer = slots * inputs.state[0].nbytes + inputs.mixed.nbytes + self.out.nbytes
        return self.nets.layers * layer

    def bind(self, verify: Callable[..., None], layer: int, **more: Any) -> Call:
        """`verify` bound to the arguments that our kernel and its reference share."""
        records, scale = self.records.layer(layer), self.nets.key_dim**-0.5
        return partial(verify, self.inputs[layer], self.out, records, scale=scale, **more)

    def check(self, call: Call, name: str) -> str:
        """Outputs and states of the last layer: ours writes a request's last state, others all."""
        norm = self.norm if name in ("nwor_norm", "vllm_cuda") else None
        self.states[-1].copy_(self._first)
        self.bind(verify_window_reference, -1, norm=norm, write_states=True)()
        state, out = self.states[-1].clone(), self.out.clone()
        self.states[-1].copy_(self._first)
        poison([self.out, *self.records])
        call()
        slots = self.table.long()
        if name.startswith(OURS):
            slots = slots.gather(1, self.committed[:, None].long() - 1)
        written = [states[slots.flatten()] for states in (self.states[-1], state)]
        fault = fault_of("states", _error(*written), STATE_ERROR[self.group.cache_dtype])
        return fault or fault_of("outputs", _error(self.out, out), OUT_ERROR)


def _error(actual: Tensor, wanted: Tensor) -> Tensor:
    """The largest difference over the largest value; NaN if there is one."""
    return (actual.float() - wanted.float()).abs().max() / wanted.float().abs().max()
