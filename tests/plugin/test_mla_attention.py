"""Latent layers wrapped as in mode stage on a GPU, against layers that were never wrapped."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latent_layers import CONTEXT, LAYERS, FlashAttnMLAImpl, LatentLayers, StockImpl, check_same
from torch import Tensor

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported


@pytest.fixture(params=[[4, 4], [4, 4, 1, 7]], ids=["windows alone", "mixed"])
def lengths(request: pytest.FixtureRequest) -> list[int]:
    return request.param


@pytest.fixture(params=[StockImpl, FlashAttnMLAImpl], ids=["program", "tail"])
def kind(request: pytest.FixtureRequest) -> type[StockImpl]:
    return request.param


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_window_is_read_from_where_it_is_staged(
    lengths: list[int],
    kind: type[StockImpl],
    copied: bool,
    joined: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = LatentLayers(lengths, None, kind).forward()
    ours = LatentLayers(lengths, monkeypatch, kind)
    ours.begin(copied)
    ours.forward(joined=joined)
    merged = ours.committed._metadata is not None
    assert merged == (kind is FlashAttnMLAImpl and lengths == [4, 4])
    assert not any(layer.impl.need_to_return_lse_for_decode for layer in ours.layers)
    assert ours.window.staged_every_layer
    assert ours.window.fallback_reason is None
    check_same(ours, stock, caches=False)
    ours.window.abort("planted")  # what was held is what stock would have written
    check_same(ours, stock, caches=True)


def test_a_control_window_is_written_at_once(
    lengths: list[int], kind: type[StockImpl], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = LatentLayers(lengths, None, kind).forward()
    ours = LatentLayers(lengths, monkeypatch, kind)
    ours.begin(copied=False, control=True)
    check_same(ours.forward(), stock, caches=True)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"silent": 0}, "attention:kv_not_staged"),
        ({"silent": 1}, "attention:kv_not_staged"),
        ({"causal": False}, "attention:not_causal"),
        ({"num_reqs": 5}, "attention:other_requests"),
        ({"num_decodes": 1}, "attention:window_as_prefill"),
        ({"num_decodes": 0}, "attention:window_as_prefill"),
    ],
)
def test_a_step_otherwise_than_planned_is_written_before_it_is_read(
    step: dict[str, Any],
    reason: str,
    lengths: list[int],
    kind: type[StockImpl],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = LatentLayers(lengths, None, kind).forward(**step)
    ours = LatentLayers(lengths, monkeypatch, kind)
    ours.begin(copied=False)
    ours.forward(**step)
    assert ours.window.fallback_reason == reason
    check_same(ours, stock, caches=True)


def test_prefills_behind_the_windows_are_left_to_stock_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = LatentLayers([4, 4, 1, 7], monkeypatch)
    ours.begin(copied=False)
    ours.forward(num_decodes=3)
    assert ours.window.fallback_reason is None
    assert [layer.impl.prefills for layer in ours.layers] == [1] * LAYERS
    check_same(ours, LatentLayers([4, 4, 1, 7]).forward(num_decodes=3), caches=False)


def test_lengths_are_shortened_once_a_forward_at_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a capture runs its forward again with the same metadata, and for padding."""
    ours = LatentLayers([4, 4, 4], monkeypatch, FlashAttnMLAImpl)
    ours.begin(copied=False)
    batch: Any = ours.window.batch
    lens, seen = ours.committed._inputs.views.seq_lens, []
    first, second = ours.metadata(3), ours.metadata(3)
    forwards = [(0, first, 9), (1, first, 5), (0, first, 7), (1, first, 0), (0, second, 20)]
    for number, metadata, length in forwards:
        lens.copy_(torch.tensor([length, 30, 0]))
        found = ours.committed.metadata(number, batch, metadata)
        assert found.block_table is metadata.block_table
        seen.append((found.decode.seq_lens.tolist(), found.decode.seq_lens.data_ptr()))
    assert [lengths for lengths, _ in seen] == [[n, 26, 0] for n in (5, 5, 3, 3, 16)]
    assert len({place for _, place in seen}) == 1
    assert metadata.decode.seq_lens.tolist() == [CONTEXT + 4] * 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"kv_cache_dtype": "fp8"}, False), ({"dcp_world_size": 2}, False)],
)
def test_stock_helps_if_it_returns_its_sums(changes: dict[str, Any], expected: bool) -> None:
    from nwor_bench.plugin.runner_v2.mla_attention import merges, returning_sums

    impl = FlashAttnMLAImpl()
    vars(impl).update(changes)
    assert merges(SimpleNamespace(impl=impl)) is expected
    assert not merges(SimpleNamespace(impl=StockImpl()))
    with contextlib.suppress(RuntimeError), returning_sums(impl):
        assert impl.need_to_return_lse_for_decode
        raise RuntimeError
    assert not impl.need_to_return_lse_for_decode


def latent_layer(**changes: Any) -> Any:
    """A layer of vLLM's Triton implementation, made without a GPU; `changes` are the impl's."""
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

    impl = object.__new__(TritonMLAImpl)
    facts = {"kv_cache_dtype": "auto", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    vars(impl).update(facts | changes)
    return SimpleNamespace(
        impl=impl, attn_backend=TritonMLABackend, sliding_window=None, kv_lora_rank=512,
        non_causal_multi_token_decode=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("impl", "layer", "length", "reason"),
    [
        ({}, {}, 5, None),
        ({"kv_cache_dtype": "fp8"}, {}, 16, None),
        ({"kv_cache_dtype": "fp8_ds_mla"}, {}, 5, "cache_dtype:fp8_ds_mla"),
        ({"qk_rope_head_dim": 0}, {}, 5, "rope_dim_0"),
        ({}, {}, 17, "window_of_17_tokens"),
        ({}, {"impl": SimpleNamespace()}, 5, "unsupported_attention:SimpleNamespace"),
        ({}, {"sliding_window": 64}, 5, "latent_sliding_window"),
        ({}, {"non_causal_multi_token_decode": True}, 5, "attention:not_causal"),
    ],
)
def test_a_latent_layer_is_refused_by_name(
    impl: dict[str, Any], layer: dict[str, Any], length: int, reason: str | None
) -> None:
    from nwor_bench.plugin.refusals import of_layer
    from nwor_bench.plugin.runner_v2.mla_attention import why_no_kernel

    made = latent_layer(**impl)
    vars(made).update(layer)
    assert of_layer(made, lambda each: why_no_kernel(each, length, torch.bfloat16)) == reason


def test_compiled_code_must_end_before_the_write_and_the_attention_of_latents() -> None:
    from vllm.config import CompilationMode

    from nwor_bench.plugin import refusals

    config = SimpleNamespace(mode=CompilationMode.VLLM_COMPILE, splitting_ops=refusals.SPLIT_OPS)
    assert refusals.of_compilation(config) is None
    ops = refusals.LATENT_SPLIT_OPS
    assert refusals.of_compilation(config, ops) == "whole_graph_compilation"
    config.splitting_ops = ops
    assert refusals.of_compilation(config, ops) is None
    config.pass_config = SimpleNamespace(fuse_rope_kvcache_cat_mla=True)
    assert refusals.of_compilation(config, ops) == refusals.LATENT_FUSION
    config.splitting_ops = refusals.SPLIT_OPS
    assert refusals.of_compilation(config) is None


def test_one_scale_serves_both_parts_of_a_latent_row() -> None:
    from nwor_bench.plugin.layers import SlotRows
    from nwor_bench.plugin.runner_v2.setup import target_caches

    layer = SimpleNamespace(
        kv_cache=torch.zeros(3, 16, 576, dtype=torch.uint8), kv_lora_rank=512, head_size=576,
        impl=SimpleNamespace(kv_cache_dtype="fp8"), _k_scale=torch.tensor(0.5),
        _v_scale=torch.tensor(7.0),
    )  # fmt: skip
    context = SimpleNamespace(static_forward_context={"0": layer})
    runner = SimpleNamespace(compilation_config=context, dtype=torch.bfloat16)
    (cache,) = target_caches(runner, ["0"], SlotRows(0, (0,)))
    assert (tuple(cache.kv_cache.shape), cache.head_dim) == ((3, 1, 16, 576), 512)
    assert cache.kv_cache.data_ptr() == layer.kv_cache.data_ptr()
    assert cache.scales is not None
    assert [scale.tolist() for scale in cache.scales] == [[0.5], [0.5]]


def test_a_latent_layers_output_is_nudged_where_both_ways_of_its_attention_meet() -> None:
    from nwor_bench.plugin.observe.attention_nudge import AttentionNudge

    class Latent(torch.nn.Module):
        kv_lora_rank = 512

        def forward_impl(
            self, q: Tensor, latent: Any, key_pe: Any, cache: Any, metadata: Any, output: Tensor,
            output_scale: Any = None,
        ) -> Tensor:  # fmt: skip
            return output.copy_(q)

    layer, query = Latent(), torch.rand(50, 8) + 1
    nudge = AttentionNudge([layer])
    seen = []
    for on, metadata in ((True, "a step"), (True, None), (False, "a step")):
        nudge.switch(on)
        output = torch.full_like(query, torch.nan)
        told = {"output": output, "output_scale": None}
        layer.forward_impl(query, None, None, None, metadata, **told)
        seen.append(torch.equal(output, query))
        nudge.switch(False)
    assert seen == [False, True, True]


def test_a_sparse_layers_output_is_nudged_once_whichever_way_it_attends() -> None:
    from nwor_bench.plugin.observe.attention_nudge import AttentionNudge

    class Sparse:
        is_sparse = True

        def forward_mqa(self, q: Tensor, cache: Any, metadata: Any, layer: Any) -> Any:
            return q.clone(), "sums"

        def forward_mha(self, q: Tensor, *_: Any, output: Tensor, output_scale: Any = None) -> None:
            output.copy_(q)

    layer: Any = SimpleNamespace(impl=Sparse(), kv_lora_rank=512)
    nudge, query = AttentionNudge([layer]), torch.rand(50, 8) + 1
    for on in (True, False):
        nudge.switch(on)
        selected, sums = layer.impl.forward_mqa(query, None, "a step", layer)
        dense = torch.full_like(query, torch.nan)
        layer.impl.forward_mha(query, None, None, None, "a step", None, output=dense)
        assert sums == "sums"
        for output in (selected, dense):
            assert torch.equal(output, query) is not on
            torch.testing.assert_close(output, query)
        nudge.switch(False)
