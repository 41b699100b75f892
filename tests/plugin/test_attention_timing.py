"""Made-up steps on which contenders are timed: sizes, places, and that the cache stays as it is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # vLLM's attention is imported

BLOCKS, KV_HEADS, BLOCK_SIZE, WIDTH, HEADS = 40, 2, 16, 8, 6


class Impl:
    """Stock's write and attention: what they were given."""

    kv_cache_dtype = "auto"

    def __init__(self) -> None:
        self.written: list[Tensor] = []
        self.metadata: list[Any] = []

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        self.written.append(kv_cache)
        assert int(slots.max()) < kv_cache.shape[0] * kv_cache.shape[2]
        tokens = kv_cache.transpose(1, 2).reshape(-1, KV_HEADS, 2 * WIDTH)
        assert tokens[slots].shape == torch.cat([key, value], -1).shape

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, *more: Any
    ) -> Tensor:
        metadata, output = more
        self.metadata.append(metadata)
        assert query.shape == output.shape
        return output


class Layer:
    """A staged layer that notes what attended it."""

    name = "layers.0"
    rules = None

    def scales(self, query: Tensor) -> None:
        return None

    def __init__(self, group: Any) -> None:
        self.group = group
        self.cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * WIDTH)
        self.layer = SimpleNamespace(impl=Impl(), kv_cache=self.cache)
        self.verified: list[Any] = []
        self.merged: list[Any] = []

    def cache_rows(self) -> Tensor:
        return self.cache

    def verify(self, contender: Any, *given: Any) -> None:
        self.verified.append((contender, given))

    def merge(self, metadata: Any, *given: Any) -> None:
        self.merged.append((metadata, given))


def over(metadata: Any, seq_lens: Tensor, staged: int, lengths: Tensor) -> list[int]:
    return torch.sub(seq_lens, staged, out=lengths).tolist()


def group_of(kind: Any) -> Any:
    return SimpleNamespace(kind=kind, committed=SimpleNamespace(over=over))


RUNNER: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, max_model_len=4096)
BUILDER: Any = SimpleNamespace(build=lambda _, common: common)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step of two windows of five rows behind 100 tokens, and its three layers."""
    from nwor_bench.plugin.runner_v2 import attention_timing
    from nwor_bench.plugin.runner_v2.attention_choice import AttentionKind, AttentionShape

    monkeypatch.setattr(attention_timing, "COLD_BYTES", 1 << 40)
    shape = AttentionShape("Stock", HEADS, KV_HEADS, WIDTH, WIDTH, "float32", "auto", BLOCK_SIZE)

    layers: list[Any] = [Layer(group_of(AttentionKind(shape, 2))) for _ in range(3)]
    return attention_timing._Step(RUNNER, layers, BUILDER, (2, 5), 100), layers


def test_each_contender_attends_every_layer(step: Any) -> None:
    from nwor_bench.plugin.runner_v2.attention_decision import Contender

    made, layers = step
    forwards = made.contenders()
    assert list(forwards) == ["stock", "ours", "ours4", "merge"]  # 15 query rows of a K/V head
    for forward in forwards.values():
        forward()
    assert made.layers == 3
    for each in layers:
        assert [name for name, _ in each.verified] == [Contender.OURS, Contender.OURS_4]
        (cache,) = {id(given.kv_cache) for _, (given,) in each.verified}
        assert cache == id(each.cache)
        assert each.merged[0][0] == [100, 100]
        assert not each.cache.any()
        (scratch,) = each.layer.impl.written
        assert all(scratch is not other.cache for other in layers)
    assert len({id(each.layer.impl.written[0]) for each in layers}) == 3


def test_latent_layers_are_timed_alike() -> None:
    """Stock writes to scratch memory and attends; the merge gets the shortened lengths."""
    from nwor_bench.plugin.runner_v2 import attention_timing
    from nwor_bench.plugin.runner_v2.attention_choice import AttentionKind, AttentionShape

    latent, rope, heads = 8, 4, 3
    shape = AttentionShape(
        "Mla", heads, 1, latent + rope, latent, "float32", "auto", BLOCK_SIZE, latent=True
    )
    calls: list[Any] = []
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, latent + rope)

    class Latents:
        def do_kv_cache_update(
            self, rows: Tensor, key_pe: Tensor, to: Tensor, slots: Tensor, *_: Any
        ) -> None:
            assert (rows.shape, key_pe.shape) == ((10, latent), (10, 1, rope))
            assert to is not cache
            assert to.view(-1, latent + rope)[slots].shape == (10, latent + rope)

        def forward_mqa(self, query: Any, of: Tensor, metadata: Any, layer: Any) -> None:
            assert [part.shape for part in query] == [(10, heads, latent), (10, heads, rope)]
            calls.append(("stock", metadata.seq_lens.tolist()))

    of_vllm = SimpleNamespace(impl=Latents(), kv_cache=cache, kv_cache_dtype="auto", _k_scale=None)
    layer: Any = SimpleNamespace(
        layer=of_vllm, cache_rows=lambda: cache.unsqueeze(1),
        group=group_of(AttentionKind(shape, 2)),
        verify=lambda step: calls.append(("ours", step.max_query_len)),
        merge=lambda attend, lengths, *given: calls.append(("merge", lengths)),
        rules=None, scales=lambda query: None,
    )  # fmt: skip
    step = attention_timing._LatentStep(RUNNER, [layer], BUILDER, (2, 5), 100)
    forwards = step.contenders()
    assert list(forwards) == ["stock", "ours", "merge"]
    for forward in forwards.values():
        forward()
    assert calls == [("stock", [105, 105]), ("ours", 5), ("merge", [100, 100])]
    assert not cache.any()


def test_a_step_has_its_lengths_and_blocks_of_its_own(step: Any) -> None:
    made, layers = step
    made.contenders()["stock"]()
    common = layers[0].layer.impl.metadata[0]
    assert common.seq_lens.tolist() == [105, 105]
    assert common.query_start_loc.tolist() == [0, 5, 10]
    blocks = common.block_table_tensor
    assert blocks.shape == (2, 7)
    assert blocks.unique().numel() == 14
    assert int(blocks.min()) > 0  # vLLM's null block
    assert int(blocks.max()) < BLOCKS
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (2, 10, 5)
