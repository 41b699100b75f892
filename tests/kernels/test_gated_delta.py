"""The torch reference of gated delta windows against float64 and vLLM's own CPU kernel."""

import pytest
import torch
from examples import examples
from gated_delta_cases import Shape, assert_rounded, definition, largest_error, make_case
from gated_delta_checks import check_window
from gated_delta_drift import LARGEST, check_drift
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS

from nwor_kernels.gated_delta.reference import commit_states_reference, verify_window_reference


@examples(40)
@given(
    seed=SEEDS,
    window=st.integers(1, 9),
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    swapped=st.booleans(),
    norm=st.sampled_from([None, "silu", "sigmoid"]),
    data=st.data(),
)
def test_any_window(seed, window, state_dtype, swapped, norm, data):
    lengths = data.draw(st.lists(st.integers(0, window), min_size=1, max_size=4))
    null_rows = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=1))
    holes = null_rows if window > 1 and data.draw(st.booleans()) else ()
    null_rows = () if holes else null_rows
    case = make_case(
        seed, lengths, window, state_dtype=state_dtype, groups=(0, 1, 0), null_rows=null_rows,
        holes=holes,
        swapped=swapped,
    )  # fmt: skip
    check_window(case, verify_window_reference, commit_states_reference, seed, norm)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_states_of_every_token_as_by_the_cpu_kernel_of_vllm(state_dtype):
    ops = pytest.importorskip("vllm._custom_ops")
    shape = Shape()
    case = make_case(7, [3, 1, 3], 3, state_dtype=state_dtype, swapped=True)
    mixed, a, b, a_log, dt_bias, state, table, accepted, starts = case.layer_inputs(0)
    keys = shape.key_heads * shape.key_dim
    mixed = mixed[: case.tokens]
    q, k, v = torch.split(mixed, [keys, keys, shape.value_heads * shape.value_dim], dim=-1)
    stock_state = state.transpose(-1, -2).contiguous()
    stock = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=a_log,
        dt_bias=dt_bias,
        q=q.reshape(-1, shape.key_heads, shape.key_dim),
        k=k.reshape(-1, shape.key_heads, shape.key_dim),
        v=v.reshape(-1, shape.value_heads, shape.value_dim),
        a=a[: case.tokens].contiguous(),
        b=b[: case.tokens].contiguous(),
        initial_state_source=stock_state,
        spec_state_indices=table.contiguous(),
        num_accepted_tokens=accepted,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )
    out = case.nan_out(torch.bfloat16)
    wanted, chains = definition(case, 0)
    verify_window_reference(
        case.layer_inputs(0), out, case.nan_records().layer(0), scale=shape.scale,
        write_states=True,
    )  # fmt: skip
    assert largest_error(out[: case.tokens], stock) < 5e-3  # roundings to bfloat16
    assert largest_error(stock, wanted) < 5e-3
    for row, chain in enumerate(chains):
        for token, after in enumerate(chain[1:]):
            slot = int(table[row, token])
            assert_rounded(case.states[0][slot], after)
            bound = 1e-6 if state_dtype is torch.float32 else 1e-2
            assert largest_error(stock_state[slot].transpose(-1, -2), after) < bound


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", LARGEST)
def test_errors_of_long_outputs(state_dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    check_drift(state_dtype, 1, verify_window_reference, commit_states_reference, cpu)
