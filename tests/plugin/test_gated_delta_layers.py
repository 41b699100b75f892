"""The wrapped methods of a gated delta net on a GPU, called as vLLM's operators call them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_state_slots import OneSlot
from test_window_states import COUNTS, LENGTH, Pieces
from torch import Tensor

from nwor_bench.plugin.patching import PatchSet
from nwor_bench.plugin.state_layers import StateTrace
from nwor_kernels.gated_delta.records import GatedNorm

pytestmark = pytest.mark.slow  # vLLM's recurrent layers are imported

TOKENS = 2 * LENGTH
PADDED = TOKENS + 2


class Net:
    """A stand-in for `QwenGatedDeltaNetAttention`, and the calls of its own methods."""

    prefix, activation, layer_norm_epsilon = "net.0", "silu", 1e-5

    def __init__(self, own: SimpleNamespace, state: Tensor):
        self.__dict__.update(vars(own))
        self.conv1d = SimpleNamespace(weight=torch.randn(40, 1, 4), bias=None)
        self.kv_cache = (torch.zeros(20, 5, 40), state)
        self.norm = SimpleNamespace(weight=torch.rand(6) + 0.5, activation="sigmoid")
        self.stock: list[str] = []

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        self.stock.append("core")

    def _forward_core_decode_spec_fused_norm(self, **_: Any) -> None:
        self.stock.append("convolution")

    def _forward_core_decode_spec_post_conv_fused_norm(self, **_: Any) -> None:
        self.stock.append("behind convolution")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    return wrapped(Pieces(), monkeypatch)


def wrapped(found: Pieces, monkeypatch: pytest.MonkeyPatch) -> Any:
    """States of three layers, of which the first has its methods wrapped."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as stock

    from nwor_bench.plugin.runner_v2 import gated_delta

    first = found.layers[0]
    net = Net(first.layer, first.state)
    object.__setattr__(first, "layer", net)
    found.calls = []  # type: ignore[attr-defined]

    def convolve(mixed: Tensor, conv_state: Tensor, *given: Any, **named: Any) -> Tensor:
        found.calls.append((conv_state.shape, given, named))  # type: ignore[attr-defined]
        return mixed * 2

    monkeypatch.setattr(stock, "causal_conv1d_update", convolve)
    monkeypatch.setattr(stock, "is_conv_state_dim_first", lambda: False)
    patches = PatchSet(gated_delta.StagedDeltaNet(0, found.states).patches())
    step = {"net.0": found.metadata(0, num_actual_tokens=TOKENS)}
    context = SimpleNamespace(attn_metadata=step)
    monkeypatch.setattr(gated_delta, "get_forward_context", lambda: context)
    found.context, found.net, found.patches = context, net, patches  # type: ignore[attr-defined]
    patches.apply()
    return found


def padded(tensor: Tensor) -> Tensor:
    """With rows of padding, as in a captured graph, that must not be read."""
    return torch.cat([tensor, torch.full((PADDED - TOKENS, *tensor.shape[1:]), float("nan"))])


def call_core(pieces: Any) -> Tensor:
    mixed, a, b = map(padded, pieces.given[0])
    out = torch.zeros(PADDED, 4, 6)
    pieces.net._forward_core(mixed_qkv=mixed, b=b, a=a, core_attn_out=out)
    return out


def call_behind_convolution(pieces: Any, gate: Tensor) -> Tensor:
    mixed, a, b = pieces.given[0]
    out = torch.zeros(TOKENS, 4, 6)
    pieces.net._forward_core_decode_spec_post_conv_fused_norm(
        mixed_qkv=mixed, b=b, a=a, output_gate=gate, core_attn_out=out,
        attn_metadata=pieces.context.attn_metadata["net.0"],
    )  # fmt: skip
    return out


def test_qwen3_next_convolves_as_stock_and_verifies(pieces: Any) -> None:
    pieces.begin()
    out = call_core(pieces)
    assert pieces.net.stock == []
    torch.testing.assert_close(out[:TOKENS], pieces.by_reference(0, pieces.given[0][0] * 2)[0])
    assert torch.equal(out[TOKENS:], torch.zeros(PADDED - TOKENS, 4, 6))
    [(shape, (weight, bias, activation), named)] = pieces.calls
    assert (tuple(shape), tuple(weight.shape)) == ((20, 40, 5), (40, 4))
    assert (bias, activation) == (None, "silu")
    assert torch.equal(named.pop("conv_state_indices"), pieces.indices[0][:, 0])
    assert named.pop("num_accepted_tokens") is pieces.accepted
    assert named.pop("query_start_loc").tolist() == [0, LENGTH, TOKENS]
    assert named == {"max_query_len": LENGTH, "validate_data": False}
    assert pieces.states.commit(COUNTS).layers == 1


def test_qwen3_5_is_verified_behind_its_convolution_with_its_norm(pieces: Any) -> None:
    pieces.begin()
    gate = torch.randn(TOKENS, 4, 6)
    out = call_behind_convolution(pieces, gate)
    norm = GatedNorm(gate, pieces.net.norm.weight, 1e-5, "sigmoid")
    torch.testing.assert_close(out, pieces.by_reference(0, norm=norm)[0])
    assert pieces.net.stock == pieces.calls == []
    assert pieces.states.commit(COUNTS).layers == 1


@pytest.mark.parametrize("why", ["no window", "beside a prefill", "no metadata"])
def test_every_other_step_is_stocks(pieces: Any, why: str) -> None:
    if why != "no window":
        pieces.begin()
    if why == "beside a prefill":
        pieces.context.attn_metadata["net.0"].num_prefills = 1
    expected = ["core"]
    if why == "no metadata":
        pieces.context.attn_metadata = None
    else:
        call_behind_convolution(pieces, torch.randn(TOKENS, 4, 6))
        expected = ["behind convolution", "core"]
    call_core(pieces)
    assert pieces.net.stock == expected
    assert pieces.calls == []
    assert pieces.states.commit(COUNTS).layers == 0


def test_with_one_state_slot_stocks_forward_runs_beside_a_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stock's forward calls the kernel that is replaced there (`test_state_slots.py`)."""
    pieces = wrapped(OneSlot(), monkeypatch)
    metadata = pieces.context.attn_metadata["net.0"]
    metadata.num_spec_decode_tokens = TOKENS
    call_core(pieces)  # no window of K/V is open
    assert pieces.net.stock == []
    metadata.num_prefills = 1
    call_core(pieces)
    assert pieces.net.stock == ["core"]


@pytest.fixture
def traced(pieces: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first layer alone, followed by a trace."""
    from nwor_bench.plugin.runner_v2.gated_delta import trace_patches

    states = pieces.states
    monkeypatch.setattr(states, "layers", states.layers[:1])
    kernels = states._kernels._replace(trace_patches=trace_patches)
    monkeypatch.setattr(states, "_kernels", kernels)
    pieces.net.kv_cache[0].copy_(torch.randn(20, 5, 40))
    states.follow(StateTrace())
    return pieces


def only_call(traced: Any) -> Any:
    """The one call that was traced: its inputs are vLLM's, and its states the cache's."""
    [call] = traced.states.trace.calls.values()
    for told, given in zip((call.mixed, call.a, call.b), traced.given[0], strict=True):
        assert torch.equal(told, given)
    assert torch.equal(call.convolution, traced.net.kv_cache[0][traced.indices[0][:, 0].long()])
    return call


def test_a_trace_has_what_vllm_gave_the_layer(traced: Any) -> None:
    traced.begin()
    call_core(traced)
    assert torch.equal(only_call(traced).convolved, traced.given[0][0] * 2)
    assert traced.net.stock == []


def test_qwen3_5s_convolution_is_traced_where_stock_calls_it(traced: Any) -> None:
    traced.begin()
    mixed, a, b = map(padded, traced.given[0])
    traced.net._forward_core_decode_spec_fused_norm(
        mixed_qkv=mixed, b=b, a=a, output_gate=None, core_attn_out=None, attn_metadata=None
    )
    only_call(traced)
    assert traced.net.stock == ["convolution"]


def test_only_windows_of_a_checked_step_are_traced(traced: Any) -> None:
    call_core(traced)  # no window
    traced.begin()
    traced.context.attn_metadata["net.0"].num_prefills = 1
    call_core(traced)
    assert traced.states.trace.calls == {}
    assert traced.net.stock == ["core", "core"]
    wrapped = vars(traced.net)["_forward_core"]
    traced.states.follow(None)
    assert vars(traced.net)["_forward_core"] is not wrapped
    traced.patches.undo()  # the mode's own are below
    assert not {name for name in vars(traced.net) if name.startswith("_forward")}


def test_a_trace_copies_the_first_requests_alone(
    traced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_bench.plugin import state_layers

    monkeypatch.setattr(state_layers, "SAMPLE", 1)
    traced.begin()
    call_core(traced)
    [call] = traced.states.trace.calls.values()
    tokens = (call.mixed, call.a, call.b, call.convolved, call.output)
    assert [len(each) for each in tokens] == [LENGTH] * 5
    assert (len(call.first), len(call.convolution)) == (1, 1)
    assert len(call.bounds) == 3
