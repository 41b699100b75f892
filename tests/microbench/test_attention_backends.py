"""Backends of `kernels --kernels attention` on a CPU: each gives the reference's result.

Triton's kernels, ours and vLLM's, run in Triton's interpreter, in a process of their own (see
tests/kernels/test_interpreter.py). It cannot multiply bfloat16: inputs are float16. FlashAttention
and FlashInfer are stand-ins that read what they are given as the real ones do.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nwor_bench.run.microbench import contenders
from nwor_bench.run.microbench.cases import InputGroup, Shape, Window
from nwor_bench.run.microbench.inputs import MERGE, STAGED, Attention

CHECKOUT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process below")


def step_of(requests: int = 3, kv_heads: int = 2, context: int = 75) -> Attention:
    torch.manual_seed(1)
    shape = Shape(layers=1, heads=8, kv_heads=kv_heads, head_dim=64)
    window = Window(requests, 4)
    step = Attention(InputGroup("attention", "bf16", window, context=context), shape)
    for name in ("query", "key", "value", "cache", "output"):
        setattr(step, name, getattr(step, name).half())
    return step


def check(name: str, step: Attention) -> None:
    """The backend is right at both numbers of rows, and nothing instead of it is wrong."""
    for each in (step, step.one_row()):
        call = contenders.KERNELS["attention"][1][name](each)
        assert each.check(call, name) == ""
        assert each.check(lambda: None, name) != ""


def attend(q: Tensor, kv: Tensor, *, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs of one request [rows, heads, dim] and its log-sum-exp; kv: [tokens, heads, 2 dim]."""
    ratio = q.shape[1] // kv.shape[1]
    key, value = kv.double().repeat_interleave(ratio, 1).chunk(2, -1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), key) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


def pages(cache: tuple[Tensor, Tensor], blocks: Tensor, tokens: int) -> Tensor:
    """K and V of a request, [tokens, kv_heads, 2 dim], from [blocks, kv_heads, size, dim] each."""
    both = torch.cat(cache, -1)[blocks.long()]
    return both.transpose(1, 2).flatten(0, 1)[:tokens]


def causal_mask(rows: int, tokens: int) -> Tensor:
    return torch.ones(rows, tokens, dtype=torch.bool).triu(tokens - rows + 1)


@in_the_interpreter
@pytest.mark.parametrize(("requests", "kv_heads"), [(3, 2), (20, 8)])
def test_vllms_triton_backend(requests: int, kv_heads: int, monkeypatch) -> None:
    """Few requests take its split kernel (from vLLM 0.33 on for windows too), 20 the other."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    platforms = pytest.importorskip("vllm.platforms")
    # vLLM hides Triton from its CPU build; the interpreter needs no driver.
    monkeypatch.setattr(platforms, "vllm_version_matches_substr", lambda _: False)
    check("triton", step_of(requests, kv_heads))


@in_the_interpreter
def test_our_staged_attention() -> None:
    check(STAGED, step_of())


@pytest.mark.long
@pytest.mark.slow
def test_triton_backends_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    roots = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "kernels")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": roots}
    done = subprocess.run(
        [*command, "-m", "not slow"], env=env, cwd=CHECKOUT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


class Wrapper:
    """FlashInfer's decode, and its prefill with `first` rows, planned on the host."""

    def __init__(self, memory: Tensor, layout: str, *, use_tensor_cores: bool = False):
        assert (memory.dtype, layout) == (torch.uint8, "HND")
        self.decodes = use_tensor_cores

    def plan(self, *given: Any, causal: bool = False, **dtypes: Any) -> None:
        starts = torch.arange(len(given[0]), dtype=torch.int32)
        given = (starts, *given) if self.decodes else given
        self.starts, self.indptr, self.indices, self.last, *sizes = given
        assert sizes == [8, 2, 64, 16]
        assert causal is not self.decodes
        assert set(dtypes.values()) == {torch.float16}

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        for request, last in enumerate(self.last.tolist()):
            rows = slice(*self.starts[request : request + 2].tolist())
            blocks = self.indices[slice(*self.indptr[request : request + 2].tolist())]
            kv = pages(cache, blocks, 16 * (len(blocks) - 1) + last)
            hidden = causal_mask(rows.stop - rows.start, len(kv))
            out[rows] = attend(query[rows], kv, hidden=hidden)[0]


@pytest.mark.parametrize("context", [75, 79, 80])  # a window over the end of a block, and at it
def test_flashinfer_is_given_its_pages(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchPrefillWithPagedKVCacheWrapper=Wrapper
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    check("flashinfer", step_of(context=context))
    step = step_of()
    step.fp8 = True
    with pytest.raises(ValueError, match="bf16 caches only"):
        contenders.KERNELS["attention"][1]["flashinfer"](step)


def test_flash_attention_is_given_the_step_and_its_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedules: list[dict[str, Any]] = []

    def schedule(**given: Any) -> dict[str, Any]:
        schedules.append(given)
        return given

    def flash(*, q, k, v, out, cu_seqlens_q, seqused_k, block_table, causal, **given) -> Any:
        assert (given["max_seqlen_q"], given["softmax_scale"]) == (len(q) // 3, 1 / 8)
        assert given["max_seqlen_k"] >= int(seqused_k.max())
        planned = given["scheduler_metadata"] if given["fa_version"] == 3 else None
        assert given["num_splits"] == (0 if planned is None else planned["num_splits"])
        assert planned is None or planned["cache_seqlens"] is seqused_k
        sums = []
        for request, tokens in enumerate(seqused_k.tolist()):
            rows = slice(*cu_seqlens_q[request : request + 2].tolist())
            kv = pages((k.transpose(1, 2), v.transpose(1, 2)), block_table[request], tokens)
            hidden = causal_mask(rows.stop - rows.start, tokens) if causal else None
            out[rows], of_rows = attend(q[rows], kv, hidden=hidden)
            sums.append(of_rows)
        return (out, torch.cat(sums, 1).float()) if given["return_softmax_lse"] else out

    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_interface = SimpleNamespace(
        get_scheduler_metadata=schedule, flash_attn_varlen_func=flash
    )
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    check("flash_attention_2", step_of())
    assert schedules == []
    check("flash_attention_3", step_of())
    assert {entry["causal"] for entry in schedules} == {True}
    if INTERPRETED:
        check(MERGE, step_of())
        assert {entry["causal"] for entry in schedules} == {True, False}
