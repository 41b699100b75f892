"""Gated delta windows beside vLLM's own kernels, and in a CUDA graph."""

import pytest
import torch
from gated_delta_cases import Case, Shape, assert_rounded, definition, largest_error, make_case
from kernel_inputs import assert_same

pytest.importorskip("triton")

from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton
from nwor_kernels.gated_delta.reference import commit_states_reference, verify_window_reference

SHAPE = Shape(key_heads=4, value_heads=8, key_dim=128, value_dim=128)

STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])


def recurrent_inputs(case: Case) -> dict[str, torch.Tensor]:
    """What vLLM's recurrent kernels take by the same names."""
    mixed, a, b, a_log, dt_bias, *_ = case.layer_inputs(0)
    shape, keys = case.shape, case.shape.key_heads * case.shape.key_dim
    q, k, v = torch.split(mixed, [keys, keys, shape.value_heads * shape.value_dim], dim=-1)
    of_keys = -1, shape.key_heads, shape.key_dim
    parts = {"q": q.reshape(of_keys), "k": k.reshape(of_keys)}
    parts["v"] = v.reshape(-1, shape.value_heads, shape.value_dim)
    return {**parts, "a": a, "b": b, "A_log": a_log, "dt_bias": dt_bias}


def stock_cpu(case: Case) -> torch.Tensor:
    """vLLM's CPU kernel, whose states lie as [slots, HV, K, V]."""
    ops = pytest.importorskip("vllm._custom_ops")
    *_, state, table, accepted, starts = case.layer_inputs(0)
    of_tokens, rest = ("q", "k", "v", "a", "b"), ("A_log", "dt_bias")
    given, swapped = recurrent_inputs(case), state.transpose(-1, -2).contiguous()
    out = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        **{name: given[name][: case.tokens].contiguous() for name in of_tokens},
        **{name: given[name] for name in rest},
        initial_state_source=swapped,
        spec_state_indices=table.contiguous(),
        num_accepted_tokens=accepted,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )
    state.copy_(swapped.transpose(-1, -2))
    return out


def stock_triton(case: Case) -> torch.Tensor:
    """vLLM's Triton kernel."""
    ops = pytest.importorskip("vllm.third_party.flash_linear_attention.ops")
    *_, state, table, accepted, starts = case.layer_inputs(0)
    given = recurrent_inputs(case)
    out, _ = ops.fused_sigmoid_gating_delta_rule_update(
        **{name: each[None] if name in "qkv" else each for name, each in given.items()},
        initial_state=state,
        cu_seqlens=starts,
        ssm_state_indices=table,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )
    return out.squeeze(0)


def stock_cuda(case: Case) -> torch.Tensor:
    """vLLM's CUDA kernel, with the gated norm in it."""
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        pytest.skip("this vLLM has no such kernel")
    mixed, a, b, a_log, dt_bias, state, table, accepted, starts = case.layer_inputs(0)
    out = case.nan_out(torch.bfloat16)
    ops.fused_gdn_decode_post_conv_mtp(
        mixed, a, b, a_log, dt_bias, table.contiguous(), starts, accepted, state,
        case.norm.gate.contiguous(), case.norm.weight, out, SHAPE.scale, case.norm.eps,
    )  # fmt: skip
    return out


@STATES
@pytest.mark.parametrize(
    ("stock", "window"),
    [
        (stock_cpu, 3),
        *(
            pytest.param(stock, window, marks=pytest.mark.gpu)
            for stock, windows in ((stock_triton, (3, 5, 8, 9)), (stock_cuda, (3, 5, 8)))
            for window in windows  # of the CUDA kernel at most 8 tokens
        ),
    ],
)
def test_states_of_every_token_as_by_the_kernels_of_vllm(stock, window, state_dtype):
    on_cpu = stock is stock_cpu
    verify, device = (verify_window_reference, "cpu") if on_cpu else (verify_window_triton, "cuda")
    case = make_case(
        window, [window, 1, 0, window - 1], window, shape=Shape() if on_cpu else SHAPE,
        state_dtype=state_dtype, swapped=on_cpu,
    ).to_device(torch.device(device))  # fmt: skip
    wanted, chains = definition(case, 0)  # outputs on the CPU, states on the device
    before = case.pages.clone()
    stock_out = stock(case)[: case.tokens]
    stock_pages = case.pages.clone()
    case.pages.copy_(before)
    out, norm = case.nan_out(torch.bfloat16), case.norm if stock is stock_cuda else None
    verify(
        case.layer_inputs(0), out, case.nan_records().layer(0), scale=case.shape.scale, norm=norm,
        write_states=True,
    )  # fmt: skip
    assert largest_error(out[: case.tokens], stock_out) < (5e-3 if on_cpu else 2e-2)
    assert norm is not None or largest_error(stock_out, wanted.to(device)) < 2e-2
    assert bool((case.pages.isnan() == stock_pages.isnan()).all()), "other slots were written"
    ours = case.states[0].clone()
    case.pages.copy_(stock_pages)
    for row, chain in enumerate(chains):
        for token, after in enumerate(chain[1:]):
            slot = int(case.tables[0][row, token])
            assert_rounded(ours[slot], after)
            bound = 1e-6 if state_dtype is torch.float32 else 1e-2
            assert largest_error(case.states[0][slot], after) < bound


@pytest.mark.gpu
@STATES
def test_a_graph_follows_its_inputs_in_place(state_dtype):
    window = 5
    case = make_case(
        1, [5, 5, 5, 0], window, shape=SHAPE, state_dtype=state_dtype, groups=(0, 1, 0)
    ).to_device(torch.device("cuda"))
    case.pages.copy_(torch.randn(case.pages.shape, device="cuda"))
    records, committed = case.nan_records(), torch.zeros(4, dtype=torch.int32, device="cuda")
    out = [case.nan_out(torch.bfloat16) for _ in case.states]
    commit = StateCommit(case.states, case.groups, case.tables, records)

    def window_of_all_layers() -> None:
        for layer in range(len(case.states)):
            verify_window_triton(
                case.layer_inputs(layer), out[layer], records.layer(layer), scale=SHAPE.scale
            )
        commit(case.accepted, committed)

    window_of_all_layers()  # nothing is committed; compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        window_of_all_layers()
    for step in range(3):
        other = make_case(50 + step, [5, 2, 4, 0], window, shape=SHAPE, groups=(0, 1, 0))
        for name in ("mixed", "a", "b"):
            mine, new = getattr(case, name), getattr(other, name)
            mine[:, : new.shape[1]].copy_(new)
        case.accepted.copy_(other.accepted)
        case.starts.copy_(other.starts)
        committed.copy_(torch.tensor([1 + step, 2, 0, 0]))
        before = case.pages.clone()
        expected = [case.nan_out(torch.bfloat16) for _ in case.states]
        reference_records = case.nan_records()
        for layer in range(len(case.states)):
            verify_window_reference(
                case.layer_inputs(layer), expected[layer], reference_records.layer(layer),
                scale=SHAPE.scale,
            )  # fmt: skip
        given = case.states, case.groups, case.tables, reference_records, None
        commit_states_reference(*given, case.accepted, committed)
        wanted = case.pages.clone()
        case.pages.copy_(before)
        graph.replay()
        torch.cuda.synchronize()
        bound = 1e-6 if state_dtype is torch.float32 else 1e-2
        assert largest_error(case.pages, wanted) < bound
        changed = (case.pages != before).any(-1)
        assert_same(changed, (wanted != before).any(-1))
        for layer, found in enumerate(out):
            tokens = int(case.starts[-1])
            assert largest_error(found[:tokens], expected[layer][:tokens]) < 2e-2
