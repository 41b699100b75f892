"""Whole windows for the commit tests, and the definition of a commit, row by row."""

from dataclasses import dataclass, field
from typing import Any

import torch
from accepted_rows import accepted_rows
from kernel_inputs import assert_same, generator, kv_of_layers, nan_caches, to_device
from torch import Tensor

from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.commit.reference import LayerCaches, commit_windows_reference
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.metadata import (
    ERROR_COUNT_MISMATCH,
    ERROR_OVERFLOW,
    ERROR_ROW_RANGE,
    ERROR_SLOT_RANGE,
)

E4M3_DTYPES = (torch.uint8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class WindowShape:
    """Windows of `tokens` rows each; `padding` more rows at the end belong to no request."""

    requests: int = 3
    tokens: int = 3
    padding: int = 2
    layers: int = 2
    kv_heads: int = 2
    widths: tuple[int, int] = (3, 5)
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "dense"
    scales: int = 0
    groups: int = 0
    """KV-cache groups; 0: one, whose slots have no dimension of groups."""

    @property
    def rows(self) -> int:
        return self.requests * self.tokens + self.padding


@dataclass
class Windows:
    """Random windows; random slots of which some are padding; all rows hold finite numbers."""

    keys: list[Tensor]
    values: list[Tensor]
    memory: Tensor
    kv_caches: list[Tensor]
    slots: Tensor
    num_sampled: Tensor
    errors: Tensor
    k_scales: list[Tensor] | None
    v_scales: list[Tensor] | None
    slot_rows: list[int] | None
    written: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def launch(self) -> None:
        """Commit with the Triton kernel."""
        plan = CommitPlan(self.kv_caches, self.k_scales, self.v_scales, self.slot_rows)
        self.launch_by(plan, self.num_sampled, self.errors, self.written)

    def launch_by(
        self, plan: CommitPlan, counts: Tensor, errors: Tensor, written: Tensor | None = None
    ) -> None:
        """Commit these rows by a plan."""
        options = dict(self.options)
        metadata = options.pop("layer_metadata", None)
        sources, rows = StagedSources(self.keys, self.values), CommitRows(self.slots, **options)
        plan.commit_windows(sources, rows, counts, errors, layer_metadata=metadata, written=written)

    def commit_by_reference(self) -> None:
        """Commit with the torch reference."""
        options = dict(self.options)
        both = {name: options.pop(name, None) for name in ("rows", "layer_metadata")}
        accepted = accepted_rows(self.num_sampled, self.slots.shape[-1], **options)
        commit_windows_reference(
            (self.keys, self.values),
            LayerCaches(self.kv_caches, self.k_scales, self.v_scales, self.slot_rows),
            self.slots,
            accepted,
            self.errors,
            written=self.written,
            **both,
        )

    def commit_by_definition(self) -> None:
        """Commit row by row and layer by layer, if nothing is out of range in any layer."""
        sources = self.options.get("rows", torch.arange(self.slots.shape[-1])).tolist()
        slots = [self._slots(layer) for layer in range(len(self.keys))]
        flags = [self._flags(layer, slots[layer], sources) for layer in range(len(slots))]
        self.errors |= torch.tensor(flags, dtype=torch.int32)
        accepted = self._accepted(len(sources))
        for layer, cache in enumerate(self.kv_caches if not any(flags) else ()):
            cache = cache.view(torch.uint8) if cache.dtype in E4M3_DTYPES else cache
            for row, (slot, source) in enumerate(zip(slots[layer], sources, strict=True)):
                if accepted[row] and slot >= 0 and source >= 0:
                    block, offset = divmod(slot, cache.shape[2])
                    cache[block, :, offset] = self._cached(layer, source)
                    self.written[layer] += 1

    def _slots(self, layer: int) -> list[int]:
        return (
            self.slots if self.slot_rows is None else self.slots[self.slot_rows[layer]]
        ).tolist()

    def _flags(self, layer: int, slots: list[int], sources: list[int]) -> int:
        """What is wrong in a layer, whether or not its row is accepted."""
        real = [(slot, source) for slot, source in zip(slots, sources, strict=True) if slot >= 0]
        staged, flags = self.options.get("layer_metadata"), 0
        if staged is not None:
            count, flags = staged[layer].tolist()
            flags |= ERROR_COUNT_MISMATCH if count != len(real) else 0
        if any(source >= len(self.keys[layer]) for _, source in real):
            flags |= ERROR_ROW_RANGE if "rows" in self.options else ERROR_OVERFLOW
        blocks, _, block_size, _ = self.kv_caches[layer].shape
        return flags | (ERROR_SLOT_RANGE if any(s >= blocks * block_size for s, _ in real) else 0)

    def _accepted(self, rows: int) -> list[bool]:
        """Row n of a request's window is kept if n is below its count."""
        tokens, counts = self.options.get("tokens_per_request"), self.num_sampled.tolist()
        if tokens is None:
            places = [self.options[name].tolist() for name in ("row_request", "row_index")]
        else:
            places = [[n // tokens for n in range(rows)], [n % tokens for n in range(rows)]]
        certain = self.options.get("certain", 0)
        return [
            0 <= request < len(counts) and index < counts[request] + certain
            for request, index in zip(*places, strict=True)
        ]

    def _cached(self, layer: int, source: int) -> Tensor:
        """[heads, K + V width] as the cache holds it; the rounding of fp8 has tests of its own."""
        both = self.keys[layer][source], self.values[layer][source]
        if self.k_scales is None or self.v_scales is None:
            return torch.cat(both, dim=-1)
        scales = self.k_scales[layer], self.v_scales[layer]
        parts = [
            quantize_e4m3(rows[None], scale)[0] for rows, scale in zip(both, scales, strict=True)
        ]
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def make_windows(shape: WindowShape, seed: int, device: torch.device | str) -> Windows:
    """A seed gives equal windows on every device; `options` say they are all equal."""
    rng = generator(seed)
    blocks = -(-shape.rows // shape.block_size) + 1
    kv = kv_of_layers(shape.layers, shape.rows, shape.kv_heads, shape.widths, shape.dtype, rng)
    keys, values = ([to_device(tensor, device) for tensor in tensors] for tensors in kv)
    each_group = [
        torch.randperm(blocks * shape.block_size, generator=rng)[: shape.rows]
        for _ in range(shape.groups or 1)
    ]
    slots = torch.stack(each_group) if shape.groups else each_group[0]
    slots[..., torch.rand(shape.rows, generator=rng) < 0.1] = -1
    slots[..., shape.requests * shape.tokens :] = -1
    slot_rows = torch.randint(0, shape.groups or 1, (shape.layers,), generator=rng).tolist()
    num_sampled = torch.randint(0, shape.tokens + 1, (shape.requests,), generator=rng)
    scales = [
        [torch.rand(shape.scales, generator=rng).add(0.02).to(device) for _ in range(shape.layers)]
        for _ in range(2)
    ]
    dtype = shape.cache_dtype or shape.dtype
    poison = torch.uint8 if dtype in E4M3_DTYPES else dtype
    cache_shape = (blocks, shape.kv_heads, shape.block_size, sum(shape.widths))
    with torch.device(device):
        memory, caches = nan_caches(shape.layers, cache_shape, poison, shape.layout)
    return Windows(
        keys,
        values,
        memory,
        [cache.view(dtype) for cache in caches],
        slots.to(device),
        num_sampled.int().to(device),
        torch.zeros(shape.layers, dtype=torch.int32, device=device),
        *(scales if shape.scales else (None, None)),
        slot_rows if shape.groups else None,
        torch.zeros(shape.layers, 5, dtype=torch.int32, device=device)[:, 2],
        {"tokens_per_request": shape.tokens},
    )


def check_windows(
    shape: WindowShape,
    seed: int,
    on_triton: torch.device | None,
    change: Any = lambda windows: None,
) -> Windows:
    """Commit by an implementation and by definition, compare all memory, return the former."""
    expected, actual = (
        make_windows(shape, seed, "cpu"),
        make_windows(shape, seed, on_triton or "cpu"),
    )
    change(expected)
    change(actual)
    expected.commit_by_definition()
    if on_triton:
        actual.launch()
    else:
        actual.commit_by_reference()
    assert_same(actual.memory.cpu(), expected.memory)
    assert_same(actual.errors.cpu(), expected.errors)
    assert_same(actual.written.cpu(), expected.written)
    return actual
