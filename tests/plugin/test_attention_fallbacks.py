"""Attention called otherwise than planned: the cache is right before it is read."""

from collections.abc import Callable
from types import SimpleNamespace
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
    """Layers that were never wrapped, behind the same step."""
    from wrapped_layers import WrappedLayers

    stock = WrappedLayers(staged=False)
    stock.forward(**arguments)
    return stock


def check_outputs(layers: Any, stock: Any) -> None:
    for ours, theirs in zip(layers.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(ours, theirs)


def check_written_directly(layers: Any, stock: Any, reason: str, verified: list[int]) -> None:
    """The window fell back for that reason, and all is as in a step that was never staged."""
    assert layers.window.fallback_reason == reason
    assert not layers.window.accept(torch.zeros(2, dtype=torch.int32))
    outcome = layers.window.close()
    assert (outcome.staged_tokens, outcome.fallback_reason) == (0, reason)
    assert layers.verified == verified
    check_outputs(layers, stock)
    assert all(torch.equal(a, b) for a, b in zip(layers.caches, stock.caches, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_as_planned_is_staged(layers: Any, way: str) -> None:
    stock = stock_after()
    layers.begin(way)
    layers.forward()
    assert layers.window.fallback_reason is None
    assert layers.window.staged_every_layer
    assert layers.verified == [0, 1, 2]
    check_outputs(layers, stock)
    assert not any(torch.equal(a, b) for a, b in zip(layers.caches, stock.caches, strict=True))


def chunked(chunk: int) -> Any:
    """The step's metadata as chunked local attention has them: requests cut into virtual ones."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches
    from wrapped_layers import BLOCK_SIZE, DRAFTS, REQUESTS, ROWS, step_metadata, step_slots

    step = step_metadata()
    common = CommonAttentionMetadata(
        query_start_loc=step.query_start_loc, query_start_loc_cpu=step.query_start_loc,
        seq_lens=step.seq_lens, seq_lens_cpu_upper_bound=step.seq_lens,
        num_reqs=REQUESTS, num_actual_tokens=ROWS, max_query_len=DRAFTS + 1,
        max_seq_len=step.max_seq_len, block_table_tensor=step.block_table,
        slot_mapping=step_slots(),
    )  # fmt: skip
    cut, _ = make_local_attention_virtual_batches(chunk, common, BLOCK_SIZE)
    assert len(cut.seq_lens) == 2 * REQUESTS  # each window crosses from one chunk into the next
    step.query_start_loc, step.seq_lens = cut.query_start_loc, cut.seq_lens
    step.block_table, step.max_seq_len = cut.block_table_tensor, cut.max_seq_len
    return step


def masked(odd: int, **facts: Any) -> dict[str, Any]:
    from wrapped_layers import step_metadata

    return {"odd_layer": odd, "metadata": SimpleNamespace(**{**vars(step_metadata()), **facts})}


ODDITIES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "silent write": (lambda odd: {"captured_write": [odd]}, "kv_not_staged"),
    "silent writes": (lambda odd: {"captured_write": range(odd, 3)}, "kv_not_staged"),
    # vLLM 0.33: a fused kernel wrote K/V
    "no key": (lambda odd: {"odd_layer": odd, "key_is_none": True}, "kv_cache_update_bypass"),
    "scale": (lambda odd: {"odd_layer": odd, "output_scale": torch.ones(1)}, "output_scale"),
    "block scale": (
        lambda odd: {"odd_layer": odd, "output_block_scale": torch.ones(1)},
        "output_block_scale",
    ),
    # Llama 4's chunked local attention beside full attention, in one group of KV caches
    "virtual requests": (
        lambda odd: {"odd_layer": odd, "metadata": chunked(12)},
        "other_requests",
    ),
    "rswa window": (lambda odd: masked(odd, rswa_window=16), "rswa_window"),
    "rswa prefix": (lambda odd: masked(odd, rswa_prefix_lens=torch.ones(2)), "rswa_prefix_lens"),
    "not causal": (lambda odd: masked(odd, causal=torch.ones(2)), "not_causal"),
}
"""What a forward does otherwise in a layer, and why its window is written directly."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("oddity", ODDITIES)
def test_a_layer_otherwise_than_planned_is_left_to_stock(
    layers: Any, way: str, odd: int, oddity: str
) -> None:
    make, reason = ODDITIES[oddity]
    arguments = make(odd)
    layers.begin(way)
    layers.forward(**arguments)
    verified = list(range(odd))
    check_written_directly(layers, stock_after(**arguments), f"attention:{reason}", verified)
    assert [layer.impl.attended for layer in layers.layers[odd:]] == [1] * (3 - odd)


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
    assert torch.equal(layers.caches[0], stock_after().caches[0])


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


def test_a_capture_keeps_the_addresses_of_its_last_run(layers: Any) -> None:
    """A capture runs the forward twice, on padding; the graph reads where the last run lay."""
    batch = layers.begin("whole step")
    layers.window.forget()
    batch.slots.fill_(-1)
    layers.staging.open(batch)
    layers.window.begin(batch, repeats=True)
    for _ in range(2):
        layers.forward()
    assert layers.window.staged_every_layer
    held = [*layers.held.keys, *layers.held.values]
    assert all(h is k for h, k in zip(held, [*layers.keys, *layers.values], strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_shares_k_and_v_reads_what_the_other_staged(layers: Any, way: str) -> None:
    """Such a layer has no write, may be called without K and V, and reads the other's cache."""
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


def cpu_layers(staged: bool) -> Any:
    """Layers of the CPU's reference backend; `staged`: in a window of all drafts."""
    from wrapped_layers import DRAFTS, REQUESTS, ROWS, WrappedLayers, step_slots

    from nwor_bench.plugin.runner_v1.cpu_attention import LayerStaging, ReferenceCPUAttentionImpl
    from nwor_bench.plugin.runner_v1.staging import StagingBuffers
    from nwor_bench.plugin.window import Window, WindowBatch

    layers: Any = WrappedLayers(staged=False)
    buffers = StagingBuffers(layers.staging.layers, REQUESTS * DRAFTS)
    layers.window = Window(buffers)
    for number, layer in enumerate(layers.layers):
        layer.impl = object.__new__(ReferenceCPUAttentionImpl)
        settings = {"why_stock": None, "scale": 0.3, "logits_soft_cap": 0.0, "sinks": None}
        vars(layer.impl).update({**settings, "sliding_window": -1})
        layer.impl.staging = LayerStaging(layers.window, buffers, number) if staged else None
    slots, direct = step_slots(), step_slots()
    rows = torch.tensor([n for n in range(ROWS) if n % (DRAFTS + 1)])
    direct[rows] = -1
    if staged:
        layers.window.begin(WindowBatch((DRAFTS,) * REQUESTS, rows, slots[rows], direct))
    return layers


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("oddity", ["silent write", "no key", "virtual requests"])
def test_on_a_cpu_the_window_is_written_before_the_cache_is_read(odd: int, oddity: str) -> None:
    make, reason = ODDITIES[oddity]
    arguments = make(odd)
    key_is_none = arguments.pop("key_is_none", False)
    stock, staged = cpu_layers(staged=False), cpu_layers(staged=True)
    stock.forward(**arguments)
    staged.forward(**arguments, key_is_none=key_is_none)
    check_written_directly(staged, stock, f"attention:{reason}", [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"is_fp8_kv_cache": True}, "cache_dtype:fp8"),
        ({"alibi_slopes": torch.ones(4)}, "alibi"),
        ({"attn_type": "encoder_only"}, "layer_type:encoder_only"),
    ],
)
def test_what_stock_attends_on_a_cpu(changes: dict[str, Any], reason: str | None) -> None:
    from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl

    impl = object.__new__(ReferenceCPUAttentionImpl)
    plain = {"is_fp8_kv_cache": False, "kv_cache_dtype": "fp8", "alibi_slopes": None}
    vars(impl).update({**plain, "attn_type": "decoder", **changes})
    assert impl._why_stock() == reason
