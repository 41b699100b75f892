"""Whole windows for the commit tests: K and V of every layer, slots, counts, NaN caches."""

from dataclasses import dataclass, field
from typing import Any

import torch
from accepted_rows import accepted_rows
from kernel_inputs import assert_same, generator, kv_of_layers, nan_caches, to_device
from torch import Tensor

from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.commit.reference import LayerCaches, commit_windows_reference

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


def compare_windows(
    shape: WindowShape,
    seed: int,
    device: torch.device | str,
    change: Any = lambda windows: None,
) -> Windows:
    """Commit the same windows both ways, compare all memory, return the Triton ones."""
    expected, actual = make_windows(shape, seed, "cpu"), make_windows(shape, seed, device)
    change(expected)
    change(actual)
    expected.commit_by_reference()
    actual.launch()
    assert_same(actual.memory.cpu(), expected.memory)
    assert_same(actual.errors.cpu(), expected.errors)
    assert_same(actual.written.cpu(), expected.written)
    return actual
