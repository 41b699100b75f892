"""Attention in mode stage, called otherwise than planned: the cache is right before it is read.

Each window is compared with the same step on layers that were never wrapped: attention's output
in every layer, and every byte of the caches.
"""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported

WAYS = ["whole step", "drafts", "drafts, copied", "equal drafts, copied"]


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    from wrapped_layers import WrappedLayers

    return WrappedLayers(staged=True, monkeypatch=monkeypatch)


def stock_after(**arguments: Any) -> Any:
    from wrapped_layers import WrappedLayers

    stock = WrappedLayers(staged=False)
    stock.forward(**arguments)
    return stock


def check_written_directly(layers: Any, stock: Any, reason: str, verified: list[int]) -> None:
    """The window fell back for that reason, and all is as in a step that was never staged."""
    assert layers.window.fallback_reason == reason
    assert not layers.window.accept(torch.zeros(2, dtype=torch.int32))
    outcome = layers.window.close()
    assert (outcome.staged_tokens, outcome.fallback_reason) == (0, reason)
    assert layers.verified == verified
    for ours, theirs in zip(layers.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(layers.caches, stock.caches, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_as_planned_is_staged(layers: Any, way: str) -> None:
    stock = stock_after()
    layers.begin(way)
    layers.forward()
    assert layers.window.fallback_reason is None
    assert layers.window.staged_every_layer
    assert layers.verified == [0, 1, 2]
    for ours, theirs in zip(layers.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not any(torch.equal(a, b) for a, b in zip(layers.caches, stock.caches, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("captured", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_a_write_that_ran_inside_a_graph_is_not_taken_for_staged(
    layers: Any, way: str, captured: list[int]
) -> None:
    layers.begin(way)
    layers.forward(captured_write=captured)
    check_written_directly(
        layers, stock_after(), "attention:kv_not_staged", list(range(captured[0]))
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_attention_without_k_and_v_reads_the_cache(layers: Any, way: str, odd: int) -> None:
    """vLLM 0.33's `kv_cache_update_bypass`: a fused kernel wrote K/V, and key is None."""
    layers.begin(way)
    layers.forward(odd_layer=odd, key_is_none=True)
    expected = list(range(odd))
    check_written_directly(layers, stock_after(), "attention:kv_cache_update_bypass", expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_a_fused_quantisation_is_left_to_stock_attention(layers: Any, way: str, name: str) -> None:
    scale = {name: torch.ones(1)}
    layers.begin(way)
    layers.forward(odd_layer=1, **scale)
    check_written_directly(layers, stock_after(), f"attention:{name}", [0])
    assert [layer.impl.attended for layer in layers.layers][1:] == [1, 1]


def chunked(chunk: int) -> Any:
    """The step's metadata as chunked local attention has them: requests cut into virtual ones."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches
    from wrapped_layers import BLOCK_SIZE, ROWS, step_metadata, step_slots

    step = step_metadata()
    common = CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=step.query_start_loc,
        seq_lens=step.seq_lens,
        num_reqs=len(step.seq_lens),
        num_actual_tokens=ROWS,
        max_query_len=4,
        max_seq_len=step.max_seq_len,
        block_table_tensor=step.block_table,
        slot_mapping=step_slots(),
        seq_lens_cpu_upper_bound=step.seq_lens,
    )
    cut, _ = make_local_attention_virtual_batches(chunk, common, BLOCK_SIZE)
    step.query_start_loc, step.seq_lens = cut.query_start_loc, cut.seq_lens
    step.block_table, step.max_seq_len = cut.block_table_tensor, cut.max_seq_len
    return step


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_metadata_of_virtual_requests_are_left_to_stock_attention(
    layers: Any, way: str, odd: int
) -> None:
    """Llama 4's chunked local attention beside full attention, in one group of KV caches."""
    metadata = chunked(12)  # each window crosses from one chunk into the next
    assert len(metadata.seq_lens) == 4
    layers.begin(way)
    layers.forward(metadata=metadata, odd_layer=odd)
    stock = stock_after(metadata=metadata, odd_layer=odd)
    check_written_directly(layers, stock, "attention:other_requests", list(range(odd)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("rswa_window", 16), ("rswa_prefix_lens", torch.ones(2)), ("causal", torch.ones(2))],
)
def test_another_mask_is_left_to_stock_attention(layers: Any, name: str, value: Any) -> None:
    from wrapped_layers import step_metadata

    metadata = step_metadata()
    setattr(metadata, name, value)
    layers.begin("whole step")
    layers.forward(metadata=metadata, odd_layer=1)
    word = "not_causal" if name == "causal" else name
    check_written_directly(layers, stock_after(), f"attention:{word}", [0])


def shared_buffers(layers: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V buffers into which each layer is computed."""
    return torch.empty_like(layers.keys[0]), torch.empty_like(layers.keys[0])


def test_layers_computed_into_one_buffer_lose_nothing(layers: Any) -> None:
    """Code compiled as a whole: the second layer's K/V lie where the first one's were."""
    layers.begin("whole step")
    layers.forward(buffers=shared_buffers(layers))
    check_written_directly(layers, stock_after(), "stage:activations_reused", [0])


def test_only_values_in_one_buffer_are_seen(layers: Any) -> None:
    buffer = torch.empty_like(layers.values[0])
    layers.begin("whole step")
    assert layers.window.stage(0, layers.keys[0], buffer.copy_(layers.values[0]))
    assert not layers.window.stage(1, layers.keys[1], buffer.copy_(layers.values[1]))
    assert layers.window.fallback_reason == "stage:activations_reused"
    stock = stock_after()
    assert torch.equal(layers.caches[0], stock.caches[0])


def test_memory_that_turns_out_to_be_shared_later_ends_the_step(layers: Any) -> None:
    """Nothing could be written any more: no token may be lost without a word."""
    from nwor_bench.plugin.window import HeldValuesLost

    layers.begin("whole step")
    layers.forward()
    layers.window.abort("planted")
    layers.window.close()
    layers.begin("whole step")
    with pytest.raises(HeldValuesLost, match=r"target layer 0 .* by layer 1 .*VLLM_NWOR"):
        layers.forward(buffers=shared_buffers(layers))


def test_a_second_window_is_held_by_reference(layers: Any) -> None:
    """Only the first one of each number of rows is copied, to see where its layers lie."""
    for expected in (False, True):
        layers.begin("whole step")
        layers.forward()
        same = [h is k for h, k in zip(layers.held.keys, layers.keys, strict=True)]
        assert same == [expected] * 3
        layers.window.abort("planted")
        layers.window.close()


def begin_capture(layers: Any) -> None:
    """Open a window of padding in which the forward may run more than once."""
    batch = layers.begin("whole step")
    layers.window.forget()
    batch.slots.fill_(-1)
    layers.staging.open(batch)
    layers.window.begin(batch, repeats=True)


def test_a_capture_keeps_the_addresses_of_its_last_run(layers: Any) -> None:
    """A capture runs the forward twice, on padding; the graph reads where the last run lay."""
    begin_capture(layers)
    for _ in range(2):
        layers.forward()
    assert layers.window.staged_every_layer
    held = [*layers.held.keys, *layers.held.values]
    assert all(h is k for h, k in zip(held, [*layers.keys, *layers.values], strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_shares_k_and_v_reads_what_the_other_staged(layers: Any, way: str) -> None:
    """It has no write, may be called without K and V, and reads the other layer's cache."""
    from types import SimpleNamespace

    from wrapped_layers import StockImpl, attend, attention_group, step_metadata

    from nwor_bench.plugin.patching import PatchSet
    from nwor_bench.plugin.runner_v2.attention import StagingAttention

    sharing: Any = SimpleNamespace(impl=StockImpl(), kv_cache=layers.caches[0])
    sharing._k_scale = sharing._v_scale = sharing._q_scale = torch.ones(1)
    around = layers.window, layers.staging, layers.inputs, 0
    made = StagingAttention(0, sharing, *around, attention_group(), writes=False)
    PatchSet(made.patches()).apply()
    assert "do_kv_cache_update" not in vars(sharing.impl)
    stock = stock_after()
    layers.begin(way)
    layers.forward()
    output, expected = (torch.full_like(layers.query, torch.nan) for _ in range(2))
    call = layers.query, None, None, layers.caches[0], step_metadata(), output
    sharing.impl.forward(sharing, *call)
    attend(layers.query, stock.caches[0], step_metadata(), expected)
    assert layers.window.fallback_reason is None
    torch.testing.assert_close(output, expected)
