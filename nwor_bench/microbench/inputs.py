"""Inputs laid out as in an engine: K/V in fused QKV outputs, slots in blocks, poisoned caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_bench.microbench.cases import Shape, Window

FP8_POISON = 0x7F
"""e4m3's NaN."""

COLD_BYTES = 512 << 20
"""Bytes that a round over all buffer sets should touch: several times any GPU's L2."""

MOST_SETS, FEWEST_SETS = 32, 2


@dataclass(frozen=True)
class Rows:
    """K and V of tokens in every layer, as views of the layers' fused QKV outputs.

    Attributes:
        keys, values: one tensor per layer, [tokens, kv_heads, head_dim].
        slots: [tokens] int64, the same for every layer.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    slots: Tensor


@dataclass(frozen=True)
class WindowSet:
    """One step: all rows, only the chosen rows, and the indices of the chosen rows."""

    all: Rows
    chosen: Rows
    choice: Tensor


def count_sets(bytes_of_one: int, most: int = MOST_SETS) -> int:
    """Number of buffer sets so that a round touches COLD_BYTES, from FEWEST_SETS to `most`."""
    return max(FEWEST_SETS, min(most, -(-COLD_BYTES // max(bytes_of_one, 1))))


def spread(total: int, window: Window, generator: torch.Generator) -> Tensor:
    """[requests] int32: `total` accepted tokens spread at random over the requests."""
    order = torch.rand(window.requests, window.drafts, generator=generator)
    chosen = torch.zeros(window.tokens, dtype=torch.int32)
    chosen[order.flatten().argsort()[:total]] = 1
    return chosen.view(window.requests, window.drafts).sum(1, dtype=torch.int32)


def leading(counts: Tensor, width: int) -> Tensor:
    """Indices (int64) of each request's first `counts` rows, in a step of `width` rows each."""
    place = torch.arange(width).repeat(counts.numel(), 1)
    return (place < counts[:, None]).flatten().nonzero(as_tuple=True)[0]


class SlotPool:
    """Slots of a paged cache: each request has blocks of its own."""

    def __init__(self, window: Window, block_size: int, sets: int, generator: torch.Generator):
        self._window, self._block_size, self._generator = window, block_size, generator
        self._blocks_each = -(-(block_size - 1 + window.drafts) // block_size)
        self.num_blocks = max(1024, sets * window.requests * self._blocks_each)
        self._free = torch.randperm(self.num_blocks, generator=generator)

    def take(self) -> Tensor:
        """[tokens] int64: consecutive positions per request, starting anywhere in a block."""
        count = self._window.requests * self._blocks_each
        blocks, self._free = self._free[:count], self._free[count:]
        blocks = blocks.view(self._window.requests, self._blocks_each)
        start = torch.randint(
            self._block_size, (self._window.requests, 1), generator=self._generator
        )
        position = start + torch.arange(self._window.drafts)
        block = blocks.gather(1, position // self._block_size)
        return (block * self._block_size + position % self._block_size).flatten()


def make_set(
    shape: Shape, rows: int, slots: Tensor, choice: Tensor, device: torch.device
) -> WindowSet:
    """`rows` random rows in every layer with a slot each, and the rows `choice` of them."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    packed = torch.randn(shape.layers, rows, width, device=device, dtype=torch.bfloat16)
    slots, choice = slots.to(device), choice.to(device)
    return WindowSet(
        _rows(packed, shape, slots), _rows(packed[:, choice], shape, slots[choice]), choice
    )


def make_caches(shape: Shape, blocks: int, cache_dtype: str, device: torch.device) -> list[Tensor]:
    """Poisoned caches in vLLM's GPU layout: [blocks, kv_heads, block_size, 2 * head_dim]."""
    sizes = (blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
    dtype = torch.uint8 if cache_dtype == "fp8" else torch.bfloat16
    caches = [torch.empty(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]
    poison(caches)
    return caches


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill with NaN, in the tensor's own number format."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else FP8_POISON)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """The first layer whose bits differ from `expected`, or an empty string."""
    for layer, (tensor, wanted) in enumerate(zip(found, expected, strict=True)):
        wrong = int((tensor.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        if wrong:
            return f"layer {layer}: {wrong} bytes differ from the reference"
    return ""


def _rows(packed: Tensor, shape: Shape, slots: Tensor) -> Rows:
    heads = packed.view(*packed.shape[:2], -1, shape.head_dim)
    keys = heads[:, :, shape.heads : shape.heads + shape.kv_heads]
    return Rows(list(keys), list(heads[:, :, shape.heads + shape.kv_heads :]), slots)
