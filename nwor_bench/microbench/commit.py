"""Our commit and stock vLLM's writes of the same rows.

A commit writes all layers' accepted rows in one launch, stock vLLM writes layer by layer.
"""

import torch
from torch import Tensor

from nwor_bench.microbench.cases import OURS, PEER, Group, Shape, bytes_moved
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
from nwor_bench.microbench.peers import bind_stock_write
from nwor_bench.microbench.rows import Call, Implementation, Implementations, with_peers
from nwor_kernels.commit.plan import CommitPlan, StagedSources
from nwor_kernels.commit.reference import commit_windows_reference

SCALE = 0.37
"""K and V scale of fp8 caches, small enough that some random values saturate e4m3."""


def commit_implementations(
    group: Group, shape: Shape, device: torch.device, seed: int
) -> Implementations:
    """Our commit of a window staged by reference, and vLLM's writes of its accepted rows."""
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
        """Our kernel and its peer."""
        return with_peers(self._ours(), {PEER["commit"]: self._peer})

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
                sources, rows.slots, counts, errors, tokens_per_request=self.group.window.drafts
            )

        calls = [bind(one.all, counts) for one, counts in self.sets]

        def check() -> str:
            wrong = self._check(calls[0])
            return wrong or ("the kernel set an error flag" if bool(errors.any()) else "")

        return Implementation(OURS, 1, self.bytes, calls, check)

    def _peer(self) -> Implementation:
        calls = [self._layer_by_layer(one.chosen) for one, _ in self.sets]
        return Implementation(
            PEER["commit"], self.shape.layers, self.bytes, calls, lambda: self._check(calls[0])
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
