"""Sparse latent layers wrapped as in mode stage on a GPU, against layers that were never wrapped.

The model's fused kernel, FlashAttention over single rows and stock attention are torch here, and
our kernels their references: compared are attention's output, and every byte of the latent caches
and of the indexers'. What is refused is asked of vLLM's own classes. `test_mla_attention.py` has
what holds for every kind of latent layer.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from latent_layers import (
    BLOCK_SIZE,
    LATENT,
    LAYERS,
    PE,
    WIDTH,
    LatentStep,
    StockWrite,
    check_same,
    write_rows,
)
from test_refusals import attention_group, attention_layer, reason_of, recurrent, runner_with
from torch import Tensor

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported

MOST = 7
"""Tokens that a query selects."""
MODULE = "vllm.models.deepseek_v32.attention"
BACKEND = "vllm.v1.attention.backends.mla.flashattn_mla_sparse"


def fused_norm_rope(
    raw: Tensor, *, slot_mapping: Tensor, mla_kv_cache: Tensor | None, indexer_k_cache: Tensor,
    kv_c_out: Tensor, k_pe_out: Tensor,
) -> str:  # fmt: skip
    """The model's kernel: slots of -1 skip the indexer's key too, and the row is always left."""
    kv_c_out.copy_(raw[:, :LATENT])
    k_pe_out.copy_(raw[:, LATENT:])
    write_rows(indexer_k_cache, raw.sum(-1, keepdim=True), slot_mapping)
    if mla_kv_cache is not None:
        write_rows(mla_kv_cache, raw, slot_mapping)
    return "queries"


def flash_attn_varlen_func(**told: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention 3 over single rows: (output, sums [heads, tokens]); NaN where it saw none."""
    assert told["causal"] is told["return_softmax_lse"] is True
    assert told["fa_version"] == 3
    query = torch.cat([told["q_v"], told["q"]], dim=-1)
    cache = torch.cat([told["v"], told["k"]], dim=-1).flatten(0, 2)
    output = torch.full(told["q_v"].shape, torch.nan)
    sums = torch.full(query.shape[:2], torch.inf)
    for token, count in enumerate(told["seqused_k"].tolist()):
        keys = cache[told["block_table"][token, :count].long()]
        if count:
            scores = query[token] @ keys.T * told["softmax_scale"]
            output[token] = scores.softmax(-1) @ keys[:, :LATENT]
            sums[token] = scores.logsumexp(-1)
    return output, sums.T.contiguous()


class StockImpl(StockWrite):
    """Stock's write and its attention over what is selected, all of it in the cache."""

    is_sparse = True

    def __init__(self, selected: Tensor):
        super().__init__()
        self.topk_indices_buffer = selected
        self.cu_seqlens_q_buffer = torch.arange(len(selected) + 1, dtype=torch.int32)

    def forward_mqa(self, query: Any, cache: Tensor, metadata: Any, layer: Any) -> Any:
        joined = torch.cat(query, dim=-1)
        output = torch.zeros(*joined.shape[:2], LATENT)
        for token in range(len(joined)):
            positions = self.topk_indices_buffer[token]
            positions = positions[positions >= 0].long()
            blocks = metadata.block_table[metadata.req_id_per_token[token]].long()
            keys = cache[blocks[positions // BLOCK_SIZE], positions % BLOCK_SIZE]
            output[token] = (joined[token] @ keys.T * self.scale).softmax(-1) @ keys[:, :LATENT]
        return output, None


@dataclass
class Metadata:
    """A step's metadata, as far as attention here reads them."""

    num_reqs: int
    num_decodes: int
    causal: bool
    block_table: Tensor
    req_id_per_token: Tensor


class SparseLayers(LatentStep):
    """Layers that share what is selected, each with an indexer; `monkeypatch` wraps them."""

    def __init__(self, lengths: list[int], monkeypatch: pytest.MonkeyPatch | None = None):
        super().__init__(lengths)
        self.indexers = [torch.zeros(*self.blocks, 1) for _ in range(LAYERS)]
        selected = torch.full((len(self.slots), MOST), -1, dtype=torch.int32)
        for token, position in enumerate(self.positions):
            selected[token] = torch.randperm(int(position) + 1, generator=self.random)[:MOST]
        self.add_layers(StockImpl(selected) for _ in range(LAYERS))
        self.model: Any = SimpleNamespace(fused_norm_rope=fused_norm_rope)
        if monkeypatch is not None:
            self._wrap(monkeypatch)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

        from nwor_bench.plugin.patching import PatchSet
        from nwor_bench.plugin.runner_v2 import sparse_mla
        from nwor_kernels.mla_verify_attention.reference import split_selection_reference

        monkeypatch.setattr(sparse_mla, "split_selection_triton", split_selection_reference)
        backend = SimpleNamespace(
            flat_kv_row_view=flat_kv_row_view, flash_attn_varlen_func=flash_attn_varlen_func
        )
        monkeypatch.setitem(sys.modules, BACKEND, backend)
        self.model = ModuleType(MODULE)
        self.model.fused_norm_rope = fused_norm_rope
        monkeypatch.setitem(sys.modules, MODULE, self.model)
        inputs = self.inputs(monkeypatch)
        self.wrapped = wrapped = [
            sparse_mla.SparseMlaAttention(number, layer, self.window, self.staging, inputs, 0)
            for number, layer in enumerate(self.layers)
        ]
        patches = [patch for each in wrapped for patch in each.patches()]
        self.patches = PatchSet([*patches, sparse_mla.fused_write_patch(wrapped, self.window)])
        self.patches.apply()

    def metadata(self, **changes: Any) -> Metadata:
        facts = {
            "num_reqs": self.requests, "num_decodes": self.requests, "causal": True,
            "block_table": self.block_table,
            "req_id_per_token": torch.from_numpy(self.request_of.astype(np.int32)),
        }  # fmt: skip
        return Metadata(**{**facts, **changes})

    def forward(
        self, silent: int | None = None, mha_from: int | None = None, **changes: Any
    ) -> "SparseLayers":
        """Run all layers as the model does.

        `silent`: a layer whose write runs past the hook; `mha_from`: the request from which on
        prefills attend densely.
        """
        metadata = self.metadata(**changes)
        until = sum(self.lengths[:mha_from])
        for number, layer in enumerate(self.layers):
            raw = self.rows[number]
            latent, key_pe = torch.full((len(raw), LATENT), torch.nan), torch.empty(len(raw), PE)
            write = fused_norm_rope if number == silent else self.model.fused_norm_rope
            found = write(
                raw, slot_mapping=self.slots, mla_kv_cache=layer.kv_cache,
                indexer_k_cache=self.indexers[number], kv_c_out=latent, k_pe_out=key_pe,
            )  # fmt: skip
            assert found == "queries"
            if until < len(raw):
                layer.impl.forward_mha(None, None, None, layer.kv_cache, metadata)
            query = self.query[:until].split([LATENT, PE], dim=-1)
            output, sums = layer.impl.forward_mqa(query, layer.kv_cache, metadata, layer)
            assert sums is None
            self.outputs.append(output)
        return self


@pytest.fixture(params=[[4, 4], [4, 4, 1, 7]], ids=["windows alone", "mixed"])
def lengths(request: pytest.FixtureRequest) -> list[int]:
    return request.param


def test_no_row_of_the_window_is_in_the_cache_before_the_commit(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ours = SparseLayers(lengths), SparseLayers(lengths, monkeypatch)
    ours.begin(copied=False)
    ours.forward()
    batch = ours.window.batch
    assert batch is not None
    for was, cache in zip(before.caches, ours.caches, strict=True):
        changed = (was.view(-1, WIDTH) != cache.view(-1, WIDTH)).any(-1).nonzero().flatten()
        assert not set(changed.tolist()) & set(batch.slots.tolist())
        assert len(changed) == (
            0 if batch.direct_slots is None else (batch.direct_slots >= 0).sum()
        )


def test_without_a_window_and_after_undoing_all_is_stock(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, stock = SparseLayers(lengths, monkeypatch), SparseLayers(lengths).forward()
    monkeypatch.setattr(StockImpl, "do_kv_cache_update", None)
    check_same(ours.forward(), stock, caches=True)
    ours.patches.undo()
    assert ours.model.fused_norm_rope is fused_norm_rope
    assert not {"forward_mqa", "forward_mha"} & set(vars(ours.layers[0].impl))


@pytest.fixture
def vllm_classes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own classes, of modules that want the CUDA build's FlashAttention."""
    flash = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    flash.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", ModuleType("vllm.vllm_flash_attn"))
    monkeypatch.setitem(sys.modules, flash.__name__, flash)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    backend, model = import_module(BACKEND), import_module(MODULE)
    monkeypatch.setitem(sys.modules, BACKEND, backend)  # so that it is forgotten afterwards
    return SimpleNamespace(backend=backend, model=model)


def sparse_layer(found: Any, **changes: Any) -> Any:
    impl = object.__new__(found.backend.FlashAttnMLASparseImpl)
    facts = {
        "kv_cache_dtype": "auto", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_size": 576,
        "num_heads": 16, "num_kv_heads": 1, "scale": 0.1,
    }  # fmt: skip
    vars(impl).update(facts | {name: changes.pop(name) for name in set(facts) & set(changes)})
    layer = object.__new__(found.model.DeepseekV32Attention)
    torch.nn.Module.__init__(layer)
    facts = {
        "impl": impl, "attn_backend": found.backend.FlashAttnMLASparseBackend,
        "hisparse_cache": None, "kv_cache": torch.zeros(3, 64, 576), "kv_lora_rank": 512,
        "head_size": 576,
    }  # fmt: skip
    vars(layer).update(facts | changes)
    return layer


def reason_of_latent(layer: Any, length: int = 5) -> str | None:
    """Why windows of that length cannot be staged in a latent layer, sparse or not."""
    from nwor_bench.plugin.refusals import of_layer
    from nwor_bench.plugin.runner_v2.mla_attention import why_no_kernel

    return of_layer(layer, lambda each: why_no_kernel(each, length, torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "length", "reason"),
    [
        ({}, 5, None),
        ({}, 17, "window_of_17_tokens"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, 5, "cache_dtype:fp8_ds_mla"),
        ({"qk_rope_head_dim": 0}, 5, "rope_dim_0"),
        ({"hisparse_cache": object()}, 5, "hisparse"),
    ],
)
def test_a_sparse_layer_is_refused_by_name(
    changes: dict[str, Any], length: int, reason: str | None, vllm_classes: Any
) -> None:
    assert reason_of_latent(sparse_layer(vllm_classes, **changes), length) == reason


def test_other_implementations_and_modules_are_refused(vllm_classes: Any) -> None:
    layer = sparse_layer(vllm_classes)
    elsewhere = SimpleNamespace(**vars(layer))  # the generic module, whose indexer is another
    reason = "unsupported_attention:FlashAttnMLASparseImpl"
    assert reason_of_latent(elsewhere) == reason
    layer.impl = type("FlashMLASparseImpl", (), {"is_sparse": True})()
    assert reason_of_latent(layer) == "unsupported_attention:FlashMLASparseImpl"


def test_a_runners_sparse_layers_are_staged_and_its_indexers_left(vllm_classes: Any) -> None:
    from nwor_bench.plugin.layers import attention_layers
    from nwor_bench.plugin.runner_v2.plan import most_referenced_rows

    names = [f"model.layers.{n}.attn" for n in range(4)]
    indexer = recurrent("models.deepseek_v2", "DeepseekV32IndexerCache")
    layers = dict(
        zip(names, [sparse_layer(vllm_classes), indexer, sparse_layer(vllm_classes), indexer],
            strict=True)
    )  # fmt: skip
    groups = [[attention_group(names[::2], 64)], [attention_group(names[1::2], 64)]]
    runner = runner_with(
        layers, attn_groups=groups, dtype=torch.bfloat16,
        block_tables=SimpleNamespace(input_block_tables=[None, None]),
    )  # fmt: skip
    for layer in layers.values():
        if hasattr(layer, "impl"):
            layer.kv_cache = layer.kv_cache.bfloat16()
    found = attention_layers(runner)
    assert (found.staged, found.indexers) == (names[::2], names[1::2])
    assert reason_of(runner) is None
    theirs = [layers[name] for name in names[::2]]
    assert most_referenced_rows(theirs, 2, 80 << 30) == (80 << 30) // 64 // (2 * 576 * 2)
    dense = runner_with({names[0]: attention_layer(), names[1]: indexer})
    assert reason_of(dense) == "sparse_indexer"
