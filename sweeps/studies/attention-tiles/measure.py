"""Which tiles serve which heads? Every shape of a launch, one layer's attention at a time.

    python sweeps/studies/attention-tiles/measure.py --output tiles.csv

Windows of 5 tokens. Each variant is compiled (by --processes at once) and compared with a float32
reference; then all variants of a case, and FlashAttention 3, take turns: a CUDA graph of 16 calls,
each on buffers of its own, so that a call reads its K/V from DRAM as it does in an engine. Needs a
GPU and vLLM. Writes a row a variant: microseconds a call, by its median.
"""

import argparse
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from nwor_bench.microbench.attention import AttentionBuffers
from nwor_bench.microbench.cases import Group, Shape, Window
from nwor_kernels.mla_verify_attention.kernel import MlaTuning, mla_verify_attention_triton
from nwor_kernels.mla_verify_attention.reference import mla_verify_attention_reference
from nwor_kernels.verify_attention.kernel import VerifyWorkspace
from nwor_kernels.verify_attention.tuning import MAX_PARTS, Tuning

WINDOW = 5
CALLS = 16
ROUNDS = 30
LATENT, ROPE = 512, 64
TOLERANCE = 1e-2
MOST_SHARED = 200 * 1024
"""Bytes of query rows and steps that leave room for the rest in an H200's shared memory."""
Call = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """Heads of a model, requests and context."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    requests: int
    context: int = 1250
    cache: str = "bf16"

    @property
    def is_latent(self) -> bool:
        """True if all heads share a latent row."""
        return self.head_dim == LATENT


MODELS = {
    "qwen3-30b-a3b": (32, 4, 128),
    "deepseek-lite": (16, 1, LATENT),
    "gpt-oss-20b": (64, 8, 64),
    "llama-8b": (32, 8, 128),
    "llama-3b": (24, 8, 128),
    "gemma-3-12b": (16, 8, 256),
}


def variants(case: Case, processors: int) -> list[dict[str, Any]]:
    """Choices that override the rules'; the first, {}, is what the rules say."""
    folded = WINDOW * case.heads // case.kv_heads
    rows = (16,) if folded <= 16 else (16, 32, 64)
    found: list[dict[str, Any]] = [{}]
    for programs in (processors, 2 * processors):
        if case.is_latent:
            found += [
                {"rows": r, "block_n": n, "num_warps": w, "num_stages": s, "programs": programs}
                for r, (n, s), w in product(rows, [(32, 3), (64, 2)], (4, 8))
                if (r + n * s) * (LATENT + ROPE) * 2 <= MOST_SHARED and (r < 64 or w == 8)
            ]
        else:
            found += [
                {"rows": r, "block_n": n, "merged": m, "programs": programs}
                for r, n, m in product(rows, (32, 64), (1, 2, 4))
                if m * r * case.head_dim <= 128 * 128
            ]
    return found


class LatentBuffers:
    """Inputs and output of one step of latent attention, whose cache holds every token."""

    def __init__(self, case: Case):
        device = torch.device("cuda")
        length, blocks_each = case.context + WINDOW, -(-(case.context + WINDOW) // 64)
        tokens = case.requests * WINDOW
        draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.query = draw(tokens, case.heads, LATENT + ROPE)
        self.rows = draw(tokens, LATENT + ROPE)
        self.cache = draw(case.requests * blocks_each, 64, LATENT + ROPE)
        self.table = torch.randperm(len(self.cache), device=device).int().view(case.requests, -1)
        self.starts = torch.arange(case.requests + 1, device=device, dtype=torch.int32) * WINDOW
        self.seq_lens = torch.full((case.requests,), length, device=device, dtype=torch.int32)
        self.output = draw(tokens, case.heads, LATENT)
        self.scale = (128 + ROPE) ** -0.5
        position = case.context + torch.arange(WINDOW, device=device)
        block = self.table[:, position // 64].flatten().long()
        self.cache[block, (position % 64).repeat(case.requests)] = self.rows

    def arguments(self, output: Tensor) -> tuple[Tensor, ...]:
        """What kernel and reference share."""
        split = (*self.query.split([LATENT, ROPE], -1), *self.rows.split([LATENT, ROPE], -1))
        steps = (self.starts, self.seq_lens, self.table, self.starts[:-1], self.starts[1:])
        return (*split, self.cache, *steps, output)

    def our_call(self, workspace: VerifyWorkspace) -> Call:
        """One launch."""
        limits = {"max_query_len": WINDOW, "max_seq_len": 16384, "workspace": workspace}
        arguments = self.arguments(self.output)
        return partial(mla_verify_attention_triton, *arguments, scale=self.scale, **limits)

    def flash_call(self) -> Call:
        """FlashAttention 3 as vLLM's FlashAttnMLA calls it; it chooses its splits."""
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        latent, rope = self.cache.unsqueeze(-2).split([LATENT, ROPE], -1)
        query, query_rope = self.query.split([LATENT, ROPE], -1)

        def attend() -> None:
            flash_attn_varlen_func(
                q=query_rope, k=rope, v=latent, q_v=query, max_seqlen_q=WINDOW,
                cu_seqlens_q=self.starts, max_seqlen_k=int(self.table.shape[1]) * 64,
                seqused_k=self.seq_lens, block_table=self.table, softmax_scale=self.scale,
                causal=True, fa_version=3, out=self.output,
            )  # fmt: skip

        return attend

    def expected(self) -> Tensor:
        """The result in float32."""
        output = torch.empty(self.output.shape, device="cuda")
        mla_verify_attention_reference(
            *self.arguments(output), scale=self.scale, dtype=torch.float32
        )
        return output


def buffers(case: Case) -> Any:
    """One set of inputs."""
    if case.is_latent:
        return LatentBuffers(case)
    group = Group(
        "verify_attention", case.cache, Window(case.requests, WINDOW - 1), None, case.context
    )
    shape = Shape(1, case.heads, case.kv_heads, case.head_dim)
    return AttentionBuffers(group, shape, torch.device("cuda"))


def workspace_of(case: Case) -> VerifyWorkspace:
    """Room for any variant."""
    tiles = case.requests * case.kv_heads * -(-WINDOW * case.heads // case.kv_heads // 16)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    rows = 2 * 2 * processors * 64
    return VerifyWorkspace.allocate(rows, case.head_dim, tiles + MAX_PARTS, torch.device("cuda"))


def tuned(case: Case, call: Call, choices: dict[str, Any]) -> Call:
    """The call with that shape of a launch."""
    return partial(call, tuning=MlaTuning(**choices) if case.is_latent else Tuning(**choices))


def compile_variants(task: tuple[Case, list[dict[str, Any]]]) -> list[str]:
    """Launch each once, in a process of its own: the binaries are found on disk later."""
    case, choices = task
    call, wrong = buffers(case).our_call(workspace_of(case)), []
    for choice in choices:
        try:
            tuned(case, call, choice)()
            torch.cuda.synchronize()
        except Exception as error:
            wrong.append(f"{case.model} {choice}: {type(error).__name__} {str(error)[:80]}")
    return wrong


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """A graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measure(case: Case, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a variant, FlashAttention's first."""
    torch.manual_seed(0)
    sets = [buffers(case) for _ in range(CALLS)]
    workspace = workspace_of(case)
    expected = sets[0].expected()
    ours = [each.our_call(workspace) for each in sets]
    named: list[tuple[dict[str, Any], list[Call]]] = [
        ({"peer": "flash_attention_3"}, [each.flash_call() for each in sets])
    ]
    named += [(choice, [tuned(case, call, choice) for call in ours]) for choice in choices]
    graphs, errors = [], []
    for choice, calls in named:
        try:
            sets[0].output.fill_(float("nan"))
            calls[0]()
            error = float((sets[0].output.float() - expected).norm() / expected.norm())
            graphs.append(captured(calls))
            errors.append(error)
        except Exception as error:
            print(case.model, choice, type(error).__name__, str(error)[:100], file=sys.stderr)
            graphs.append(None)
            errors.append(float("nan"))
    times: list[list[float]] = [[] for _ in graphs]
    order = [number for number, graph in enumerate(graphs) if graph is not None]
    for _ in range(ROUNDS):
        random.shuffle(order)
        for number in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000)
            start.record()
            graphs[number].replay()
            end.record()
            end.synchronize()
            times[number].append(1e3 * start.elapsed_time(end) / CALLS)
    return [
        {**case.__dict__, **choice, "error": error, "us": median(own) if own else None,
         "wrong": not error < TOLERANCE, "device": torch.cuda.get_device_name()}
        for (choice, _), error, own in zip(named, errors, times, strict=True)
    ]  # fmt: skip


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--requests", nargs="+", type=int, default=[4, 8, 64])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    cases = [Case(name, *MODELS[name], n) for name in arguments.models for n in arguments.requests]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = {case: variants(case, processors) for case in cases}
    tasks = [(case, choices[first::8]) for case, choices in chosen.items() for first in range(8)]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for wrong in pool.map(compile_variants, tasks):
            for line in wrong:
                print(line, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for case, choices in chosen.items():
        found = measure(case, choices)
        rows += found
        pd.DataFrame(rows).to_csv(arguments.output, index=False, float_format="%.5g")
        mine = pd.DataFrame(found).drop(columns=list(case.__dict__))
        print(case, flush=True)
        print(pd.concat([mine.head(2), mine.sort_values("us").head(8)]).to_string(), flush=True)


if __name__ == "__main__":
    main()
