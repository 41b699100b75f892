"""Layers whose windows stock attends in part: the write, the metadata and the merge together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # vLLM's attention is imported

HELD = ["whole step", "equal drafts, copied"]


class Committed:
    """A stand-in for FlashAttention over the committed tokens, in torch."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def __call__(
        self, layer: Any, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor
    ) -> Tensor:
        lengths, starts = metadata.seq_lens.tolist(), metadata.query_start_loc.tolist()
        self.lengths.append(lengths)
        heads, width = query.shape[1:]
        sums = torch.full((heads, query.shape[0]), torch.nan)
        for r, length in enumerate(lengths):
            rows, blocks = slice(starts[r], starts[r + 1]), metadata.block_table[r].long()
            context = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
            key, value = context.split(width, dim=-1)
            ratio = heads // key.shape[1]
            key, value = (each.repeat_interleave(ratio, dim=1) for each in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query[rows], key) * layer.impl.scale
            sums[:, rows] = scores.logsumexp(-1)
            output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return sums


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds layers that attend by this contender; (layers, stock's calls)."""
    import wrapped_layers
    from wrapped_layers import WrappedLayers, attention_group

    from nwor_bench.plugin.runner_v2 import attention
    from nwor_bench.plugin.runner_v2.attention_choice import AttentionKind
    from nwor_bench.plugin.runner_v2.committed import CommittedOnly
    from nwor_kernels.window_merge.reference import merge_window_reference

    def build(contender: Any) -> tuple[Any, Committed]:
        committed = Committed()
        monkeypatch.setattr(attention, "attend_committed", committed)
        monkeypatch.setattr(attention, "merge_window_triton", merge_window_reference)
        layers: Any = None

        def group() -> Any:
            made = attention_group()
            made.kind = AttentionKind(made.kind.shape, 2, can_merge=True, forced=contender)
            only = CommittedOnly(inputs, 4, torch.device("cpu"), shortened)
            made.committed = only
            return made

        def shortened(metadata: Any, lengths: Tensor) -> Any:
            return SimpleNamespace(**{**vars(metadata), "seq_lens": lengths})

        inputs = SimpleNamespace(views=None)
        shared = None

        def of_layer() -> Any:
            nonlocal shared
            shared = shared or group()
            return shared

        monkeypatch.setattr(wrapped_layers, "attention_group", of_layer)
        layers = WrappedLayers(staged=True, monkeypatch=monkeypatch)
        shared.committed._inputs = layers.inputs
        return layers, committed

    return build


@pytest.mark.parametrize("way", HELD)
def test_it_is_stocks_attention(merging: Any, way: str) -> None:
    from wrapped_layers import CONTEXT, DRAFTS, LAYERS, REQUESTS, WrappedLayers

    from nwor_bench.plugin.runner_v2.attention_decision import Contender

    layers, committed = merging(Contender.MERGE)
    stock = WrappedLayers(staged=False)
    stock.forward()
    layers.begin(way)
    layers.forward()
    staged = DRAFTS + 1 if way == "whole step" else DRAFTS
    assert committed.lengths == [[CONTEXT + DRAFTS + 1 - staged] * REQUESTS] * LAYERS
    assert layers.verified == []
    for ours, theirs in zip(layers.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_steps_are_our_kernels(merging: Any) -> None:
    from wrapped_layers import LAYERS

    from nwor_bench.plugin.runner_v2.attention_decision import Contender

    layers, committed = merging(Contender.MERGE)
    layers.begin("drafts")
    layers.forward()
    assert committed.lengths == []
    assert layers.verified == list(range(LAYERS))


def test_lengths_are_shortened_once_a_forward() -> None:
    """Also if a forward comes again with the same metadata, as in a capture."""
    from nwor_bench.plugin.runner_v2.committed import CommittedOnly

    calls = []

    def shortened(metadata: Any, lengths: Tensor) -> Any:
        calls.append((metadata, lengths.tolist()))
        return len(calls)

    seq_lens = torch.tensor([9, 0, 40], dtype=torch.int32)
    inputs: Any = SimpleNamespace(views=SimpleNamespace(seq_lens=seq_lens))
    only = CommittedOnly(inputs, 8, torch.device("cpu"), shortened)
    batch: Any = SimpleNamespace(tokens_per_request=5)
    assert [only.metadata(n, batch, "first") for n in (2, 3, 4)] == [1] * 3
    assert [only.metadata(n, batch, "first") for n in (2, 3)] == [2] * 2
    seq_lens += 1
    assert only.metadata(2, batch, "second") == 3
    assert calls == [("first", [4, 0, 35])] * 2 + [("second", [5, 0, 36])]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"vllm_flash_attn_version": 2},
        {"sliding_window": (127, 0)},
        {"logits_soft_cap": 30.0},
        {"sinks": torch.ones(4)},
    ],
    ids=lambda change: next(iter(change), "plain"),
)
def test_what_cannot_be_merged(change: dict[str, Any]) -> None:
    from nwor_bench.plugin.runner_v2.committed import can_merge

    class FlashAttentionImpl:
        vllm_flash_attn_version = 3
        sliding_window = (-1, -1)
        logits_soft_cap = 0
        sinks = None

    impl = FlashAttentionImpl()
    vars(impl).update(change)
    assert can_merge(impl) is (not change)
    assert not can_merge(SimpleNamespace(vllm_flash_attn_version=None))
