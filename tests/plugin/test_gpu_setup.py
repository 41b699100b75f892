"""What staging on a GPU may take of its memory: rows held by reference, and copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from nwor_bench.plugin.layers import LayerCache, StagingUnavailable
from nwor_bench.plugin.runner_v2.layer_set import CopyBuffers
from nwor_bench.plugin.runner_v2.staging import GpuStaging

LAYERS = 2


def staging() -> GpuStaging:
    caches = [torch.zeros(3, 2, 4, 24) for _ in range(LAYERS)]
    layers = [LayerCache(str(n), cache, 16, torch.float32) for n, cache in enumerate(caches)]
    return GpuStaging(layers, capacity=6)


HEADS = SimpleNamespace(num_heads=32, num_kv_heads=8, head_size=128)
LATENT = SimpleNamespace(kv_lora_rank=512, q_lora_rank=1536, head_size=576)


@pytest.mark.slow  # vLLM's attention is imported
@pytest.mark.parametrize(
    ("layer", "layers", "row_bytes"),
    [
        (SimpleNamespace(impl=HEADS, head_size_v=128), 32, 2 * 48 * 128),  # Llama-3.1-8B in bf16
        (SimpleNamespace(impl=HEADS, head_size_v=64), 32, 2 * (40 * 128 + 8 * 64)),
        # The latent, and the fused projection of 1536 + 512 + 64 that the rotary part is a view of.
        (SimpleNamespace(impl=LATENT, kv_lora_rank=512), 61, 2 * 2624),
    ],
)
def test_by_reference_a_step_may_hold_a_64th_of_the_devices_memory(
    layer: Any, layers: int, row_bytes: int
) -> None:
    from nwor_bench.plugin.runner_v2.plan import most_referenced_rows

    rows = most_referenced_rows([layer] * layers, 2, 80 << 30)
    assert rows == (80 << 30) // 64 // (layers * row_bytes)
    assert most_referenced_rows([layer] * layers, 2, None) is None


def test_copies_have_their_memory_before_the_first_window() -> None:
    made = staging()
    assert made.sets[0].buffers is None  # mode off takes none
    assert made.allocate() is None
    assert made.sets[0].buffers is not None
    before = made.copies.data_ptr()
    assert made.allocate() is None
    assert made.copies.data_ptr() == before


def test_without_memory_for_copies_nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> CopyBuffers:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 MiB")

    monkeypatch.setattr(CopyBuffers, "create", full)
    assert staging().allocate() == "copy_buffers:OutOfMemoryError"


def test_a_reason_is_a_label_so_it_has_no_numbers_of_a_message() -> None:
    caches = [torch.zeros(3, 2, 4, 24, dtype=torch.int32) for _ in range(LAYERS)]
    layers = [LayerCache(str(n), cache, 16, torch.float32) for n, cache in enumerate(caches)]
    with pytest.raises(StagingUnavailable, match=r"^commit:caches_do_not_fit$"):
        GpuStaging(layers, capacity=6)
