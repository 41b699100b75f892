"""The GPU's planted faults on a staging made of the torch reference: each changes the cache.

A fault that plants nothing would look like a check that sees nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import SimpleNamespace

import numpy as np
import planted_gpu
import pytest
import torch

from nwor_bench.plugin.layers import LayerCache
from nwor_bench.plugin.runner_v2.plan import DraftCounts, drafts_only, whole_step
from nwor_bench.records.types import ScvMode
from nwor_kernels.commit.reference import accepted_rows, commit_windows_reference

LAYERS, LENGTH, HEADS, DIM, BLOCK = 3, 5, 2, 4, 8
SLOTS = torch.tensor([8, 9, 10, 11, 12, 21, 22, 23, 24, 25, 40, 41, 42, 43, 44])
"""Three windows of a certain token and four drafts."""


class ReferenceStaging:
    """`GpuStaging` as far as the faults know it, committing by the torch reference."""

    def __init__(self, mixed: bool, dtype: torch.dtype):
        random = torch.Generator().manual_seed(1)
        caches = [
            torch.randn(8, HEADS, BLOCK, 2 * DIM, generator=random).to(dtype) for _ in range(LAYERS)
        ]
        self.layers = [LayerCache(f"layer{i}", c, DIM, torch.float32) for i, c in enumerate(caches)]
        self.num_layers = LAYERS
        self.keys = list(torch.randn(LAYERS, len(SLOTS), HEADS, DIM, generator=random))
        self.values = list(torch.randn(LAYERS, len(SLOTS), HEADS, DIM, generator=random))
        self._through = None
        counts = DraftCounts(np.full(3, LENGTH - 1, dtype=np.int32), len(SLOTS))
        if mixed:
            starts = np.arange(0, len(SLOTS) + 1, LENGTH, dtype=np.int32)
            self._batch = drafts_only(counts, starts, SLOTS, copied=False)
        else:
            self._batch = whole_step(counts, LENGTH, torch.arange(len(SLOTS)), SLOTS)

    def commit(self, slots: torch.Tensor, counts: torch.Tensor) -> str:
        batch = self._batch
        accepted = accepted_rows(
            counts,
            slots.numel(),
            certain=batch.certain,
            tokens_per_request=batch.tokens_per_request,
            row_request=batch.row_request,
            row_index=batch.row_index,
        )
        caches = [layer.kv_cache for layer in self.layers]
        ones = [torch.ones(1)] * LAYERS if caches[0].element_size() == 1 else None
        commit_windows_reference(
            self.keys,
            self.values,
            caches,
            slots,
            accepted,
            torch.zeros(LAYERS, dtype=torch.int32),
            rows=None if batch.tokens_per_request else batch.rows,
            k_scales=ones,
            v_scales=ones,
        )
        return ""


@contextmanager
def planted(name: str, staging: ReferenceStaging) -> Iterator[None]:
    validator = SimpleNamespace(mode=ScvMode.GRAPH)
    worker = SimpleNamespace(nwor_hook=SimpleNamespace(buffers=staging, validator=validator))
    with getattr(planted_gpu, name)(worker):
        yield


def caches_after(name: str | None, mixed: bool, dtype: torch.dtype) -> torch.Tensor:
    """All caches after two windows, the second with other rows."""
    staging = ReferenceStaging(mixed, dtype)

    def run() -> None:
        slots = staging._batch.slots
        staging.commit(slots, torch.tensor([2, 0, 3], dtype=torch.int32))
        staging.keys = [key.flip(0) for key in staging.keys]
        staging.commit(slots, torch.tensor([1, 2, 4], dtype=torch.int32))

    if name is None:
        run()
    else:
        with planted(name, staging):
            run()
    return torch.stack([layer.kv_cache.float() for layer in staging.layers])


COMMIT_FAULTS = [
    "head_wrong_in_commit",
    "last_layer_one_slot_on",
    "one_too_few",
    "one_too_many",
    "one_too_many_in_scv_graph",
    "rejected_committed",
    "layer_skipped",
    "values_of_two_layers_swapped",
    "key_and_value_swapped",
    "commit_after_the_next_begin",
    "value_rounded_to_fp8",
]
WHOLE_STEPS_ALONE = ["first_token_not_written", "slots_of_two_requests_swapped"]


@pytest.mark.parametrize("name", COMMIT_FAULTS)
@pytest.mark.parametrize("mixed", [False, True], ids=["whole step", "drafts only"])
def test_a_fault_of_the_commit_changes_the_cache(name: str, mixed: bool) -> None:
    sound = caches_after(None, mixed, torch.float32)
    assert not torch.equal(caches_after(name, mixed, torch.float32), sound)


@pytest.mark.parametrize("name", WHOLE_STEPS_ALONE)
def test_a_fault_of_a_whole_step_changes_the_cache(name: str) -> None:
    sound = caches_after(None, False, torch.float32)
    assert not torch.equal(caches_after(name, False, torch.float32), sound)


@pytest.mark.parametrize("name", ["stale_scale", "head_wrong_in_commit"])
def test_a_fault_of_an_fp8_cache_changes_it(name: str) -> None:
    sound = caches_after(None, False, torch.float8_e4m3fn)
    changed = caches_after(name, False, torch.float8_e4m3fn)
    assert (changed != sound).any(dim=(1, 2, 3, 4)).tolist() == [False, True, False]


@pytest.mark.slow  # vLLM's attention backends are imported
def test_a_fault_of_attention_takes_what_attention_is_given() -> None:
    from nwor_bench.plugin.runner_v2.attention import StagingAttention

    given = signature(StagingAttention._verify).parameters
    assert list(signature(planted_gpu.attend_to_the_cache).parameters) == list(given)


def test_what_reads_all_rows_leaves_the_cache_as_it_was() -> None:
    staging = ReferenceStaging(False, torch.float32)
    before = [layer.kv_cache.clone() for layer in staging.layers]
    counts = torch.tensor([2, 0, 3], dtype=torch.int32)
    window = planted_gpu.Commit(staging, SLOTS, counts, staging.commit)
    rows = window.rows_of_all()
    for layer, cache in enumerate(before):
        assert torch.equal(staging.layers[layer].kv_cache, cache)
        expected = torch.cat([staging.keys[layer], staging.values[layer]], -1)
        assert torch.equal(rows[layer], expected)
    assert window.written.tolist() == [
        *(True, True, True, False, False),
        *(True, False, False, False, False),
        *(True, True, True, True, False),
    ]
