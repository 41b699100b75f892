"""Stage: our kernel copies a layer's draft rows into staging buffers; peers write them to cache."""

from dataclasses import replace

import torch
from torch import Tensor

from nwor_bench.microbench.baselines import make_baseline
from nwor_bench.microbench.cases import COPY, EMPTY, OURS, PEERS, Group, Shape, bytes_moved
from nwor_bench.microbench.commit import SCALE
from nwor_bench.microbench.implementation import (
    Call,
    Implementation,
    Implementations,
    with_peers,
)
from nwor_bench.microbench.inputs import (
    Rows,
    SlotPool,
    WindowSet,
    difference,
    make_caches,
    make_set,
    poison,
)
from nwor_bench.microbench.peers import make_writer
from nwor_kernels.commit.reference import commit_windows_reference
from nwor_kernels.metadata import STAGED_COUNT
from nwor_kernels.stage.kernel import stage_kv_cache_triton

SETS = 64
"""Calls in a round: one call takes 1-2 us, too short to time alone."""


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
        writer = make_writer(name, self.shape, self.group.cache_dtype, self.scale)
        calls = [
            writer.bind(rows.keys[0], rows.values[0], self.caches[0], writer.prepare(rows.slots))
            for rows in (one.chosen for one in self.sets)
        ]

        def check() -> str:
            poison(self.caches)
            expected = self._expected(self.sets[0].chosen)
            calls[0]()
            return difference(self.caches, expected, exact=False)

        cache_bytes = 2 if self.group.cache_dtype == "bf16" else 1
        return Implementation(
            name, writer.launches, self.bytes * (2 + cache_bytes) // 4, calls, check
        )

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
