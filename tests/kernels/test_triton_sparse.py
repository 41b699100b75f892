"""A sparse layer's selection split, attended by stock in part and merged: MLA attention over what
each query row has selected, by its definition.

Stock's part is torch in float64, over the cached rows that the split has found; one test has the
real FlashAttention 3.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from attention_cases import TOLERANCE, Request
from kernel_inputs import INTERPRETED, generator
from mla_cases import MlaStep, arguments, check, make_mla_step

pytest.importorskip("triton")
from nwor_kernels.mla_verify_attention.reference import (
    mla_tail_reference,
    split_selection_reference,
)
from nwor_kernels.mla_verify_attention.tail import mla_tail_triton, split_selection_triton

NAN, JUNK = float("nan"), -777


@dataclass
class Selected:
    """`positions` [tokens, most] int32, -1 for none; `request_of` [tokens] int32."""

    positions: torch.Tensor
    request_of: torch.Tensor


def select(step: MlaStep, most: int, only: str = "all", seed: int = 0) -> Selected:
    """Every position up to `most`, else as many at random, in any order with gaps between.

    `only`: "committed" or "staged" leaves the others out; "nothing" all of them in odd rows.
    """
    rng = np.random.default_rng(seed)
    found = np.full((step.paged.owned_rows, most), -1, dtype=np.int32)
    request_of = np.repeat(np.arange(len(step.requests)), [r.queries for r in step.requests])
    staged = (step.staged.end - step.staged.start).tolist()
    for token, r in enumerate(request_of):
        request = step.requests[r]
        seen = request.cached + token - int(step.paged.query_start_loc[r]) + 1
        committed = request.length - staged[r]
        keep = {
            "all": range(seen),
            "committed": range(min(seen, committed)),
            "staged": range(committed, seen),
            "nothing": range(0 if token % 2 else seen),
        }
        chosen = rng.permutation(np.array(keep[only], dtype=np.int32))[:most]
        found[token, rng.permutation(most)[: len(chosen)]] = chosen
    return Selected(torch.from_numpy(found), torch.from_numpy(request_of.astype(np.int32)))


def expected_of(step: MlaStep, selected: Selected) -> np.ndarray:
    """Attention over the selected positions from its definition; 0 for a row without any."""
    query = step.query.double().numpy()
    output = np.full((*query.shape[:2], step.latent_dim), np.nan)
    for token, r in enumerate(selected.request_of.tolist()):
        positions = selected.positions[token]
        keys = step.rows[r].double().numpy()[positions[positions >= 0].numpy()]
        scores = query[token] @ keys.T * step.scale
        weights = np.exp(scores - scores.max(initial=-np.inf, axis=1, keepdims=True))
        total = np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
        output[token] = weights / total @ keys[:, : step.latent_dim]
    return output


def split(step: MlaStep, selected: Selected, device="cpu", how=split_selection_triton):
    """(cached rows, [2, tokens] counts and bits) on the host, over junk."""
    rows = torch.full(selected.positions.shape, JUNK, dtype=torch.int32, device=device)
    selection = torch.full((2, len(rows)), JUNK, dtype=torch.int32, device=device)
    how(
        selected.positions.to(device), selected.request_of.to(device),
        arguments(step, device).requests, rows, selection,
        block_size=step.paged.block_size, block_rows=step.paged.block_size,
    )  # fmt: skip
    return rows.cpu(), selection.cpu()


def merge(tail, step: MlaStep, parts, device="cpu", *, empty_lse=-torch.inf, double=False):
    """The output after `tail`, from stock's attention over the cached rows of each query row."""
    rows, selection = parts
    query, cache = step.query.double(), step.cache.flatten(0, 1).double()
    output = torch.full((*query.shape[:2], step.latent_dim), NAN, dtype=torch.float64)
    lse = torch.full(query.shape[:2], NAN, dtype=torch.float64)
    of_window = (step.staged.end > step.staged.start).tolist()
    for token, count in enumerate(selection[0].tolist()):
        if not of_window[int(np.searchsorted(step.paged.query_start_loc[1:], token, "right"))]:
            continue
        keys = cache[rows[token, :count].long()]
        scores = query[token] @ keys.T * step.scale
        lse[token] = scores.logsumexp(1) if count else empty_lse
        output[token] = scores.softmax(1) @ keys[:, : step.latent_dim] if count else NAN
    lse = lse.to(device, torch.float64 if double else torch.float32).T.contiguous().T
    padded = torch.full((2, len(query)), JUNK, dtype=torch.int32, device=device)
    padded[:, : selection.shape[1]] = selection
    given = arguments(step, device, dtype=torch.float64 if double else None)
    given.output.copy_(output)
    tail(given, lse, padded, *[torch.float64] * double)
    return given.output.cpu()


def windows(queries: int, *contexts: int) -> list[Request]:
    return [Request(context, queries, queries - 1) for context in contexts]


MIXED = [*windows(3, 0, 9, 60), Request(40, 21), Request(70, 1), Request(9, 5, 1), Request(0, 4, 3)]
"""Windows, a prefill, a decode, and a request whose prefill ends beside one draft."""

CASES = [
    ("all", 128, True),  # every context is below what is selected
    ("all", 16, True),
    ("all", 16, False),  # the first token of each window lies in the cache
    ("committed", 16, True),
    ("staged", 16, True),
    ("nothing", 24, False),
]


@pytest.mark.parametrize("requests", [windows(5, 0, 7, 90), MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize(("only", "most", "whole"), CASES)
def test_the_reference_is_attention_over_what_is_selected(requests, only, most, whole):
    step = make_mla_step(requests, whole=whole, seed=1)
    selected = select(step, most, only, seed=2)
    parts = split(step, selected, how=split_selection_reference)
    result = merge(mla_tail_reference, step, parts, double=True)
    result = result.nan_to_num() if only != "all" else result  # rows that see nothing at all
    check_rows(step, selected, result, 1e-12)


def check_rows(step: MlaStep, selected: Selected, result: torch.Tensor, tolerance: float) -> None:
    """As `check`, where some rows of a window may see nothing and are 0."""
    wanted = torch.from_numpy(expected_of(step, selected))
    for r, request in enumerate(step.requests):
        rows = slice(*step.paged.query_start_loc[r : r + 2].tolist())
        if not request.drafts:
            continue
        error = (result[rows].double() - wanted[rows]).norm() / wanted[rows].norm().clamp(min=1e-9)
        assert error < tolerance, f"request {r}: {error:.2e}"


@pytest.mark.parametrize("requests", [windows(5, 0, 7, 90), MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize(("only", "most", "whole"), CASES)
def test_windows(triton_device, requests, only, most, whole):
    """The selection is split where the cache ends, as by the reference; then the tail is merged."""
    step = make_mla_step(requests, whole=whole, seed=5)
    selected = select(step, most, only, seed=6)
    parts = split(step, selected, triton_device)
    for ours, wanted in zip(parts, split(step, selected, how=split_selection_reference),
                            strict=True):  # fmt: skip
        assert torch.equal(ours, wanted)
    result = merge(mla_tail_triton, step, parts, triton_device)
    check_rows(step, selected, result, TOLERANCE[torch.float32])
    if only == "all":  # rows of requests without a window, and padding, were left alone
        check(step, result, expected_of(step, selected), TOLERANCE[torch.float32])


@pytest.mark.parametrize("empty_lse", [torch.inf, NAN])
def test_what_stock_says_of_an_empty_selection_is_not_read(triton_device, empty_lse):
    step = make_mla_step(windows(3, 9, 60), seed=7, dtype=torch.float16)
    selected = select(step, 16, "staged", seed=8)
    parts = split(step, selected, triton_device)
    result = merge(mla_tail_triton, step, parts, triton_device, empty_lse=empty_lse)
    check_rows(step, selected, result, TOLERANCE[torch.float16])


def test_padding_of_a_captured_shape_selects_nothing(triton_device):
    """Tokens behind the last request, given to any; and requests without tokens."""
    step = make_mla_step([*windows(2, 20), Request(0, 2), Request(0, 0)], whole=False, seed=9)
    step.staged.start[1:], step.staged.end[1:], step.paged.seq_lens[1:] = 0, 1, 0
    step.paged.block_table[1:] = 10**6
    selected = select(step, 8, seed=10)
    selected.positions[2:] = -1
    selected.request_of[3] = 99
    rows, selection = split(step, selected, triton_device)
    assert (selection[:, 2:] == 0).all()
    assert (rows[2:] == -1).all()


@pytest.mark.long  # imports vLLM
@pytest.mark.skipif(not INTERPRETED, reason="vLLM's kernel, in the interpreter")
def test_vllms_kernel_leaves_a_row_that_it_has_no_cache_for(monkeypatch):
    """The row as it would be written, and the indexer's key; slots of -1 would lose the key."""
    triton_utils = pytest.importorskip("vllm.triton_utils")
    # On a CPU vLLM has stand-ins for both, and its kernels cannot be interpreted.
    monkeypatch.setattr(triton_utils, "triton", __import__("triton"))
    monkeypatch.setattr(triton_utils, "tl", __import__("triton.language", fromlist=["language"]))
    kernels = pytest.importorskip("vllm.models.deepseek_v32.common.kernels")
    rows, real = 6, torch.tensor([3, 4, 5, 70, 71, -1])
    rng = generator(14)
    projected = torch.randn(rows, 128 + 512 + 64, generator=rng).bfloat16()
    index_key, rotation = torch.randn(rows, 128, generator=rng), torch.randn(9, 64, generator=rng)
    factors = torch.rand(512, generator=rng).bfloat16()

    def run_it(slots, with_cache):
        query, latent, key_pe = projected.split([128, 512, 64], dim=-1)
        left = [torch.full_like(part, NAN) for part in (latent, key_pe)]
        cache, keys = torch.zeros(2, 64, 576).bfloat16(), torch.zeros(2, 64, 132).byte()
        kernels.fused_norm_rope(
            torch.arange(rows), query, factors[:128], 1e-6, latent, factors, 1e-6, key_pe, rotation,
            index_key.bfloat16(), torch.ones(128), torch.zeros(128), 1e-6, rotation,
            torch.zeros(rows, 64, dtype=torch.int32), slot_mapping=slots,
            indexer_slot_mapping=slots, indexer_k_cache=keys,
            mla_kv_cache=cache if with_cache else None, mla_k_scale=torch.ones(1),
            kv_c_out=left[0], k_pe_out=left[1],
        )  # fmt: skip
        return torch.cat(left, dim=-1), cache.flatten(0, 1), keys

    stock, held, padding = run_it(real, True), run_it(real, False), run_it(real * 0 - 1, True)
    assert torch.equal(held[0], stock[0])
    assert torch.equal(held[0][:5], stock[1][real[:5]])
    assert torch.equal(held[2], stock[2])
    assert stock[2].any()
    assert not padding[2].any()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="a CUDA graph")
@pytest.mark.parametrize(
    ("requests", "heads", "most"), [(1, 16, 512), (8, 16, 2048), (64, 128, 512)]
)
def test_with_flash_attention_in_a_captured_graph(requests, heads, most):
    """FlashAttention 3 over single rows as vLLM calls it, contexts below and above `most`."""
    pytest.importorskip("vllm.vllm_flash_attn")
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    cuda, queries = torch.device("cuda"), 5
    contexts = torch.randint(0, 3 * most, (requests,), generator=generator(11)).tolist()
    contexts[0] = 0
    step = make_mla_step(
        windows(queries, *contexts), heads=heads, latent_dim=512, pe_dim=64, block_size=64,
        dtype=torch.bfloat16, seed=12,
    )  # fmt: skip
    selected = select(step, most, seed=13)
    tokens = len(selected.positions)
    positions, request_of = selected.positions.to(cuda), selected.request_of.to(cuda)
    given = arguments(step, cuda)
    given = given._replace(query=given.query[:tokens], query_pe=given.query_pe[:tokens])
    flat = given.kv_cache.flatten(0, 1)
    each_alone = torch.arange(tokens + 1, dtype=torch.int32, device=cuda)
    merged = torch.full((tokens, heads, 512), NAN, dtype=torch.bfloat16, device=cuda)

    def launch():
        rows = torch.empty_like(positions)
        selection = torch.empty(2, tokens, dtype=torch.int32, device=cuda)
        split_selection_triton(
            positions, request_of, given.requests, rows, selection, block_size=64, block_rows=64
        )
        output, lse = flash_attn_varlen_func(
            q=given.query_pe, k=flat[:, None, None, 512:], v=flat[:, None, None, :512],
            q_v=given.query,
            max_seqlen_q=1, cu_seqlens_q=each_alone, max_seqlen_k=most, seqused_k=selection[0],
            block_table=rows, softmax_scale=step.scale, causal=True, fa_version=3,
            return_softmax_lse=True,
        )  # fmt: skip
        mla_tail_triton(given._replace(output=output), lse.T, selection)
        merged.copy_(output)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    merged.fill_(NAN)
    graph.replay()
    wanted = torch.from_numpy(expected_of(step, selected))[:tokens]
    error = (merged.cpu().double() - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    worst = int(error.nan_to_num(nan=torch.inf).argmax())
    told = f"row {worst % queries} of a context of {contexts[worst // queries]}"
    assert error[worst] < TOLERANCE[torch.bfloat16], f"{told}: {error[worst]:.2e}"
