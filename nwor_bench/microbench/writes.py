"""Inputs and calls of the kernels that write: commit, stage and mask, and of their peers.

A commit writes all layers' accepted rows in one launch, stock vLLM writes layer by layer. A stage
copies one layer's draft rows into buffers, stock vLLM writes them to the cache. A mask marks
accepted drafts from counts on the device; no other project has such a kernel.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nwor_bench.microbench.cases import COPY, EMPTY, OURS, PEERS, Group, Shape, bytes_moved
from nwor_bench.microbench.inputs import (
    Rows,
    SlotPool,
    WindowSet,
    count_sets,
    difference,
    leading,
    make_caches,
    make_set,
    poison,
    spread,
)
from nwor_bench.microbench.peers import bind_stock_write, make_baseline
from nwor_bench.microbench.rows import Call, Implementation, Implementations, with_peers
from nwor_kernels.commit.plan import CommitPlan, StagedSources
from nwor_kernels.commit.reference import commit_windows_reference
from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton
from nwor_kernels.mask.reference import acceptance_mask_from_counts_reference
from nwor_kernels.metadata import STAGED_COUNT
from nwor_kernels.stage.kernel import stage_kv_cache_triton

SETS = 64
"""Calls in a round of stage or mask: one call takes 1-2 us, too short to time by itself."""

SCALE = 0.37
"""K and V scale of fp8 caches, small enough that some random values saturate e4m3."""


def commit_implementations(
    group: Group, shape: Shape, device: torch.device, seed: int
) -> Implementations:
    """Our commit of a window staged by reference, and the peers' writes of its accepted rows."""
    return _CommitInputs(group, shape, device, seed).implementations()


class _CommitInputs:
    """Sets of windows, and one cache per layer that all implementations write."""

    def __init__(self, group: Group, shape: Shape, device: torch.device, seed: int):
        self.group, self.shape, self.device = group, shape, device
        generator = torch.Generator().manual_seed(seed)
        window = group.window
        self.bytes = bytes_moved(group, shape)
        sets = count_sets(self.bytes)
        pool = SlotPool(window, shape.block_size, sets, generator)
        self.sets: list[tuple[WindowSet, Tensor]] = []
        for _ in range(sets):
            counts = spread(group.accepted, window, generator)
            choice = leading(counts, window.drafts)
            one = make_set(shape, window.tokens, pool.take(), choice, device)
            self.sets.append((one, counts.to(device)))
        self.caches = make_caches(shape, pool.num_blocks, group.cache_dtype, device)
        self.scale = torch.full((1,), SCALE, device=device)
        fp8 = group.cache_dtype == "fp8"
        scales = [self.scale] * shape.layers if fp8 else None
        self.scales = (scales, scales)
        self.expected = self._expected()

    def implementations(self) -> Implementations:
        """Our kernel and its peers."""
        return with_peers(self._ours(), PEERS["commit"], self._peer)

    def _expected(self) -> list[Tensor]:
        """The caches after the torch reference commits the first set."""
        expected = [cache.clone() for cache in self.caches]
        one, _ = self.sets[0]
        accepted = torch.zeros(one.all.slots.numel(), dtype=torch.bool, device=self.device)
        accepted[one.choice] = True
        errors = torch.zeros(self.shape.layers, dtype=torch.int32, device=self.device)
        k_scales, v_scales = self.scales
        commit_windows_reference(
            one.all.keys, one.all.values, expected, one.all.slots, accepted, errors,
            k_scales=k_scales, v_scales=v_scales,
        )  # fmt: skip
        return expected

    def _ours(self) -> Implementation:
        plan = CommitPlan(self.caches, *self.scales)
        errors = torch.zeros(self.shape.layers, dtype=torch.int32, device=self.device)

        def bind(rows: Rows, counts: Tensor) -> Call:
            sources = StagedSources(rows.keys, rows.values)
            return lambda: plan.commit_windows(
                sources,
                rows.slots,
                counts,
                errors,
                tokens_per_request=self.group.window.drafts,
            )

        calls = [bind(one.all, counts) for one, counts in self.sets]

        def check() -> str:
            wrong = self._check(calls[0])
            return wrong or ("the kernel set an error flag" if bool(errors.any()) else "")

        return Implementation(OURS, 1, self.bytes, calls, check)

    def _peer(self, name: str) -> Implementation:
        if name in (EMPTY, COPY):
            return make_baseline(name, self.bytes, len(self.sets), self.device)
        calls = [self._layer_by_layer(one.chosen) for one, _ in self.sets]
        return Implementation(
            name, self.shape.layers, self.bytes, calls, lambda: self._check(calls[0])
        )

    def _layer_by_layer(self, rows: Rows) -> Call:
        layers = zip(rows.keys, rows.values, self.caches, strict=True)
        writes = [bind_stock_write(*layer, rows.slots, self.scale) for layer in layers]

        def write_layers() -> None:
            for write in writes:
                write()

        return write_layers

    def _check(self, call: Call) -> str:
        poison(self.caches)
        call()
        return difference(self.caches, self.expected)


def stage_implementations(
    group: Group, shape: Shape, device: torch.device, seed: int
) -> Implementations:
    """Our staging of one layer, and the peers' writes of the same rows to that layer's cache."""
    return _StageInputs(group, replace(shape, layers=1), device, seed).implementations()


class _StageInputs:
    """Sets of steps of one layer: drafts + 1 rows per request, of which the drafts are staged."""

    def __init__(self, group: Group, shape: Shape, device: torch.device, seed: int):
        self.group, self.shape, self.device = group, shape, device
        generator = torch.Generator().manual_seed(seed)
        window = group.window
        self.bytes = bytes_moved(group, shape)
        pool = SlotPool(window, shape.block_size, SETS, generator)
        step = torch.arange(window.requests * (window.drafts + 1))
        choice = step[step % (window.drafts + 1) > 0]
        self.sets = [
            make_set(shape, step.numel(), pool.take(), choice, device) for _ in range(SETS)
        ]
        self.caches = make_caches(shape, pool.num_blocks, group.cache_dtype, device)
        self.scale = torch.full((1,), SCALE, device=device)

    def implementations(self) -> Implementations:
        """Our kernel and its peers."""
        return with_peers(self._ours(), PEERS["stage"], self._peer)

    def _ours(self) -> Implementation:
        sizes = (SETS, 2, self.group.window.tokens, self.shape.kv_heads, self.shape.head_dim)
        buffers = torch.empty(sizes, dtype=torch.bfloat16, device=self.device)
        metadata = torch.zeros(SETS, 2, dtype=torch.int32, device=self.device)

        def bind(one: WindowSet, to: Tensor, metadata: Tensor) -> Call:
            return lambda: stage_kv_cache_triton(
                one.all.keys[0], one.all.values[0], one.choice, to[0], to[1], metadata
            )

        calls = [bind(*each) for each in zip(self.sets, buffers, metadata, strict=True)]

        def check() -> str:
            poison([buffers])
            metadata.fill_(-1)
            calls[0]()
            rows = self.sets[0].chosen
            wanted = torch.stack([rows.keys[0], rows.values[0]])
            if wrong := difference([buffers[0]], [wanted]):
                return wrong
            count = int(metadata[0, STAGED_COUNT])
            tokens = self.group.window.tokens
            return "" if count == tokens else f"it counted {count} rows, not {tokens}"

        return Implementation(OURS, 1, self.bytes, calls, check)

    def _peer(self, name: str) -> Implementation:
        if name in (EMPTY, COPY):
            return make_baseline(name, self.bytes, SETS, self.device)
        calls = [
            bind_stock_write(rows.keys[0], rows.values[0], self.caches[0], rows.slots, self.scale)
            for rows in (one.chosen for one in self.sets)
        ]

        def check() -> str:
            poison(self.caches)
            expected = self._expected(self.sets[0].chosen)
            calls[0]()
            return difference(self.caches, expected)

        cache_bytes = 2 if self.group.cache_dtype == "bf16" else 1
        return Implementation(name, 1, self.bytes * (2 + cache_bytes) // 4, calls, check)

    def _expected(self, rows: Rows) -> list[Tensor]:
        """The poisoned cache after the torch reference writes these rows."""
        expected = [cache.clone() for cache in self.caches]
        every = torch.ones_like(rows.slots, dtype=torch.bool)
        errors = torch.zeros(1, dtype=torch.int32, device=self.device)
        scales = [self.scale] if self.group.cache_dtype == "fp8" else None
        commit_windows_reference(
            rows.keys, rows.values, expected, rows.slots, every, errors,
            k_scales=scales, v_scales=scales,
        )  # fmt: skip
        return expected


def mask_implementations(
    group: Group, shape: Shape, device: torch.device, seed: int
) -> Implementations:
    """The mask as SCV launches it: from `num_sampled`, with equal drafts per request."""
    generator = torch.Generator().manual_seed(seed)
    window, moved = group.window, bytes_moved(group, shape)
    sets = [
        (
            (spread(group.accepted, window, generator) + 1).to(device),
            torch.empty(window.tokens, dtype=torch.bool, device=device),
            torch.empty(window.requests, dtype=torch.int32, device=device),
        )
        for _ in range(SETS)
    ]

    def bind(num_sampled: Tensor, mask: Tensor, num_accepted: Tensor) -> Call:
        return lambda: acceptance_mask_from_counts_triton(
            num_sampled, None, mask, num_accepted, window.drafts
        )

    calls = [bind(*each) for each in sets]

    def check() -> str:
        num_sampled, mask, num_accepted = sets[0]
        wanted, wanted_counts = mask.clone(), num_accepted.clone()
        acceptance_mask_from_counts_reference(
            num_sampled, None, wanted, wanted_counts, window.drafts
        )
        mask.copy_(~wanted)
        num_accepted.fill_(-1)
        calls[0]()
        right = torch.equal(mask, wanted) and torch.equal(num_accepted, wanted_counts)
        return "" if right else "the mask or its counts differ from the reference"

    ours = Implementation(OURS, 1, moved, calls, check)
    return with_peers(ours, PEERS["mask"], lambda name: make_baseline(name, moved, SETS, device))
