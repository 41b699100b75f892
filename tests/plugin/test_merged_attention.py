"""Layers whose windows stock attends in part: the write, the metadata and the merge together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_attention_fallbacks import check_outputs, stock_after
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # vLLM's attention is imported


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


@pytest.mark.parametrize("way", ["whole step", "equal drafts, copied", "drafts"])
def test_merged_windows_are_stocks_attention_and_others_our_kernels(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    from wrapped_layers import CONTEXT, DRAFTS, LAYERS, REQUESTS, WrappedLayers, attention_group

    from nwor_bench.plugin.runner_v2 import attention
    from nwor_bench.plugin.runner_v2.attention_decision import Contender
    from nwor_bench.plugin.runner_v2.committed import CommittedOnly
    from nwor_kernels.window_merge.reference import merge_window_reference

    committed = Committed()
    monkeypatch.setattr(attention, "attend_committed", committed)
    monkeypatch.setattr(attention, "merge_window_triton", merge_window_reference)

    def shortened(metadata: Any, lengths: Tensor) -> Any:
        return SimpleNamespace(**{**vars(metadata), "seq_lens": lengths})

    def make_group(inputs: Any) -> Any:
        only = CommittedOnly(inputs, 4, torch.device("cpu"), shortened)
        return attention_group(only, can_merge=True, forced=Contender.MERGE)

    layers = WrappedLayers(True, monkeypatch, make_group=make_group)
    layers.begin(way)
    layers.forward()
    staged = {"whole step": DRAFTS + 1, "equal drafts, copied": DRAFTS, "drafts": None}[way]
    read = staged and [CONTEXT + DRAFTS + 1 - staged] * REQUESTS
    assert committed.lengths == ([read] * LAYERS if read else [])
    assert layers.verified == ([] if read else list(range(LAYERS)))
    check_outputs(layers, stock_after())


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
