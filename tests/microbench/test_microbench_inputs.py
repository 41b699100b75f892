"""What contenders are given, its bytes, and whether a wrong result is seen; no GPU."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from nwor_bench.run.microbench import contenders, inputs
from nwor_bench.run.microbench.cases import OURS, PEER, InputGroup, Nets, Shape, Window
from nwor_bench.run.microbench.inputs import MERGE, STAGED, Attention, Commit, NetWindow

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64)


@given(st.builds(Window, st.integers(1, 20), st.integers(1, 15)), st.floats(0.01, 1))
@examples(30)
def test_accepted_tokens_lead_their_windows_and_no_slot_is_given_twice(window, share) -> None:
    group = InputGroup("commit", "bf16", window, share)
    step = Commit(group, SHAPE)
    assert int(step.counts.sum()) == group.accepted
    accepted = step.accepted.view(window.requests, window.drafts)
    assert accepted.sum(1).tolist() == step.counts.tolist()
    assert bool((accepted[:, 1:] <= accepted[:, :-1]).all())
    width = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim
    for each in (step.keys, step.split(step.fused[:, step.accepted])[1]):
        assert each[0].stride() == (width, SHAPE.head_dim, 1)  # as in fused QKV outputs
    assert len(set(step.slots.tolist())) == window.tokens
    assert 0 <= int(step.slots.min()) <= int(step.slots.max()) < step.sizes[0] * 16
    offsets = step.slots.view(window.requests, window.drafts) % 16
    steps = (offsets[:, 1:] - offsets[:, :-1]) % 16
    assert bool((steps == 1).all())  # consecutive positions, over the end of a block too


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_every_wrong_byte_of_a_commit_is_seen(cache_dtype: str) -> None:
    step = Commit(InputGroup("commit", cache_dtype, Window(5, 4), 0.5), SHAPE)

    def write(layer: int | None = None) -> None:
        for cache, wanted in zip(step.caches, step.wanted, strict=True):
            cache.copy_(wanted)
        if layer is not None:
            step.caches[layer].view(torch.uint8)[-1, -1, -1, -1] ^= 1

    assert step.check(write, OURS) == ""
    assert step.check(lambda: write(1), OURS) == "layer 1: 1 bytes differ from the reference"
    assert step.check(lambda: None, OURS).startswith("layer 0: ")
    step.errors[1] = 4
    assert "error flag" in step.check(write, OURS)


def test_bytes_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, window = Shape(layers=3, kv_heads=2, head_dim=64, heads=4), Window(5, 4)
    row = 2 * 2 * 64 * 2  # K and V of two heads of 64 in bf16
    for dtype, cached in (("bf16", row), ("fp8", row // 2)):
        step = Commit(InputGroup("commit", dtype, window, 0.5), shape)
        assert step.bytes_moved(OURS) == 3 * 10 * (row + cached)
    attention = Attention(InputGroup("verify_attention", "fp8", window, context=100), shape)
    assert attention.bytes_moved(OURS) == 5 * 100 * row // 2 + 25 * row
    monkeypatch.setattr(inputs, "NETS", Nets(layers=2, key_heads=1, value_heads=2))
    nets = NetWindow(InputGroup("gated_delta", "bf16", window), shape)
    state, tokens = 2 * 128 * 128 * 2, 25 * (2 * 128 + 2 * 256) * 2  # inputs and outputs
    assert nets.bytes_moved("nwor_norm") == 2 * (5 * 2 * state + tokens)
    assert nets.bytes_moved("vllm_triton") == 2 * (5 * 6 * state + tokens)


def test_attentions_reference_is_attention() -> None:
    torch.manual_seed(5)
    step = Attention(InputGroup("verify_attention", "bf16", Window(3, 4), context=37), SHAPE)
    dense = []
    for request in range(3):
        kv = step.cache[step.table[request].long()].transpose(1, 2).flatten(0, 1)[:42].double()
        key, value = kv.repeat_interleave(2, dim=1).transpose(0, 1).chunk(2, dim=-1)
        query = step.query[5 * request : 5 * request + 5].double().transpose(0, 1)
        hidden = torch.ones(5, 42, dtype=torch.bool).tril(37)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
        dense.append(out.transpose(0, 1))
    wanted = step.wanted
    torch.testing.assert_close(wanted.double(), torch.cat(dense), rtol=1e-5, atol=1e-5)
    assert step.check(lambda: step.output.copy_(wanted), OURS) == ""
    assert "error 2" in step.check(lambda: step.output.copy_(wanted * 1.02), OURS)
    assert "nan" in step.check(lambda: step.output[1:].copy_(wanted[1:]), OURS)
    seen = {}
    for name in (OURS, PEER["verify_attention"]):
        step.check(lambda name=name: seen.update({name: step.cache.float().abs().max()}), name)
    assert seen[OURS].isnan()  # ours must not read the window from the cache
    assert seen[PEER["verify_attention"]] < 10  # it reads what stock wrote


def test_one_row_is_the_windows_first_on_the_same_cache() -> None:
    torch.manual_seed(6)
    step = Attention(InputGroup("attention", "bf16", Window(3, 4), context=37), SHAPE)
    one = step.one_row()
    assert one.cache.data_ptr() == step.cache.data_ptr()
    assert (one.rows, one.seq_lens.tolist(), one.query.shape[0]) == (1, [38] * 3, 3)
    torch.testing.assert_close(one.wanted, step.wanted[::5])
    assert one.wanted.dtype == torch.float64
    for each, row in ((step, 4), (one, 0)):
        assert each.check(lambda each=each: each.output.copy_(each.wanted), MERGE) == ""
        for name in (MERGE, STAGED):
            seen = []
            each.check(lambda each=each, row=row, seen=seen: seen.append(cached(each, row)), name)
            assert seen[0].isnan().all() if name == STAGED else bool((seen[0] == 100).all())
        assert cached(each, row).abs().max() < 10


def cached(step: Attention, row: int) -> torch.Tensor:
    """What stands in the cache for a row of the last request."""
    slot = int(step.slots[-step.rows + row])
    return step.cache.transpose(1, 2)[slot // 16, slot % 16].float()


def test_a_wrong_state_or_output_of_a_net_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "NETS", Nets(layers=2, key_heads=1, value_heads=2))
    step = NetWindow(InputGroup("gated_delta", "f32", Window(2, 3)), SHAPE)
    reference = step.bind(inputs.verify_window_reference, -1, write_states=True)
    assert step.check(reference, "control") == ""
    assert "states: error" in step.check(lambda: None, "control")

    def spoil(tensor: torch.Tensor) -> str:
        def call() -> None:
            reference()
            tensor[step.table[0, 0] if tensor.dim() == 4 else 0] *= 1.5

        return step.check(call, "control")

    assert spoil(step.states[-1]).startswith("states: ")
    assert spoil(step.out).startswith("outputs: ")


def test_the_table_has_ours_first_and_the_main_peer() -> None:
    for kernel, peer in PEER.items():
        _, rows = contenders.KERNELS[kernel]
        assert next(iter(rows)) == OURS
        assert peer in rows


@pytest.mark.parametrize(("times", "sets"), [(0.1, 2), (2.5, 3), (1000, 32)])
def test_each_call_of_a_graph_has_inputs_of_its_own(
    times: float, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = InputGroup("commit", "bf16", Window(2, 4), 0.5)
    moved = Commit(group, SHAPE).bytes_moved(OURS)
    monkeypatch.setattr(contenders, "COLD_BYTES", int(times * moved))
    calls = contenders.contenders(group, SHAPE)[0].bind()
    assert len(calls) == sets
    assert len({call.args[1].slots.data_ptr() for call in calls}) == sets  # slots
