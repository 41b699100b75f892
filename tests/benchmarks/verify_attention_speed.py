"""The verification kernel against one-pass FlashAttention 3, as vLLM calls it under full graphs.

    PYTHONPATH=.:kernels python tests/benchmarks/verify_attention_speed.py [--out STEM]

FlashAttention reads every token from the cache; ours reads the context from there and the window
from the step's K/V. Both are checked against float32 attention first, ours with NaN in the
window's slots. A time is that of one call in a CUDA graph that goes round several sets of buffers,
so that no call finds its K/V in L2; the two kernels' graphs are replayed in turn, and a ratio is
taken within each turn. `--out sweeps/results/h200/verify_attention` writes that table to .csv and
.md. Exits with 1 when a result is wrong.
"""

import argparse
import csv
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.verify_attention.kernel import Tuning, VerifyWorkspace, verify_attention_triton

COLD_BYTES = 256 << 20
"""What a round of buffer sets should touch: several times the L2 of any GPU so far."""

MAX_SEQ_LEN = 16_384
"""What the graphs are captured for; the lengths that they meet are shorter."""

TOLERANCE = {"bf16": 1e-2, "fp8": 6e-2}
"""Relative error allowed; FlashAttention rounds its weights to e4m3 for an fp8 cache."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    requests: int
    context: int
    cache: str = "bf16"
    block_size: int = 16
    drafts: int = 4
    heads: int = 24
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def window(self) -> int:
        """Query rows of a request."""
        return self.drafts + 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        size = 1 if self.cache == "fp8" else 2
        tokens = self.requests * (self.context + self.window)
        return tokens * self.kv_heads * 2 * self.head_dim * size


CASES = [
    *(Case(n, context, block_size=size) for size in (16, 64) for n in (8, 64)
      for context in (1024, 8192)),
    Case(256, 1024),
    *(Case(64, context, drafts=8) for context in (1024, 8192)),
    *(Case(n, context, "fp8") for n in (8, 64) for context in (1024, 8192)),
]  # fmt: skip


@dataclass
class Buffers:
    """One set of tensors of a case; the cache holds every token, the window's too."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor
    starts: Tensor
    seq_lens: Tensor
    table: Tensor
    output: Tensor
    scale: Tensor

    @classmethod
    def make(cls, case: Case) -> "Buffers":
        window, dim = case.window, case.head_dim
        blocks = triton.cdiv(case.context + window, case.block_size)
        total = case.requests * blocks
        shape = (total, case.kv_heads, case.block_size, 2 * dim)
        cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        width = (case.heads + 2 * case.kv_heads) * dim
        fused = torch.randn(case.requests * window, width, device="cuda", dtype=torch.bfloat16)
        query, key, value = (
            part.unflatten(1, (-1, dim))
            for part in fused.split([case.heads * dim, *[case.kv_heads * dim] * 2], dim=1)
        )
        scale = torch.full((1,), 0.02, device="cuda")
        if case.cache == "fp8":
            cache = (cache / scale).to(torch.float8_e4m3fn)
            query = quantize_e4m3(query, scale)
        table = torch.randperm(total, device="cuda", dtype=torch.int32).view(case.requests, -1)
        starts = torch.arange(case.requests + 1, device="cuda", dtype=torch.int32) * window
        seq_lens = torch.full((case.requests,), case.context + window, device="cuda").int()
        output = torch.full(query.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        made = cls(case, query, key, value, cache, starts, seq_lens, table, output, scale)
        made.write_window()
        return made

    def _window_slots(self) -> tuple[Tensor, Tensor]:
        position = self.case.context + torch.arange(self.case.window, device="cuda")
        block = self.table[:, position // self.case.block_size].flatten().long()
        return block, (position % self.case.block_size).repeat(self.case.requests)

    def write_window(self) -> None:
        """The window's K/V into the cache, as a stock write does it."""
        block, offset = self._window_slots()
        rows = torch.cat([self.key, self.value], dim=-1)
        if self.case.cache == "fp8":
            rows = quantize_e4m3(rows, self.scale)
        self.cache.transpose(1, 2).view(torch.uint8)[block, offset] = rows.view(torch.uint8)

    def poison_window(self) -> None:
        """NaN where the window's K/V would be."""
        block, offset = self._window_slots()
        nan = torch.full((1,), float("nan"), device="cuda").to(self.cache.dtype)
        self.cache.transpose(1, 2).view(torch.uint8)[block, offset] = nan.view(torch.uint8).repeat(
            2 * self.case.head_dim
        )

    def expected(self) -> Tensor:
        """Attention in float32, request by request."""
        case, dim = self.case, self.case.head_dim
        factor = float(self.scale) if case.cache == "fp8" else 1.0
        ratio, result = case.heads // case.kv_heads, []
        tokens = case.context + case.window
        query = self.query.float() * factor
        row = torch.arange(case.window, device="cuda")[:, None]
        hidden = torch.arange(tokens, device="cuda")[None, :] > case.context + row
        for request in range(case.requests):
            kv = self.cache[self.table[request].long()].float().transpose(0, 1).flatten(1, 2)
            kv = (kv[:, :tokens] * factor).repeat_interleave(ratio, dim=0)
            q = query[request * case.window : (request + 1) * case.window].transpose(0, 1)
            scores = (q @ kv[..., :dim].transpose(1, 2) * dim**-0.5).masked_fill(hidden, -math.inf)
            result.append((scores.softmax(dim=-1) @ kv[..., dim:]).transpose(0, 1))
        return torch.cat(result)


def our_call(buffers: Buffers, workspace: VerifyWorkspace, tuning: Tuning | None = None) -> Call:
    """One launch of the verification kernel; the whole window is staged."""
    b, fp8 = buffers, buffers.case.cache == "fp8"
    return lambda: verify_attention_triton(
        b.query,
        b.key,
        b.value,
        b.cache,
        b.starts,
        b.seq_lens,
        b.table,
        b.starts[:-1],
        b.starts[1:],
        b.output,
        scale=b.case.head_dim**-0.5,
        max_query_len=b.case.window,
        max_seq_len=MAX_SEQ_LEN,
        q_scale=b.scale if fp8 else None,
        k_scale=b.scale if fp8 else None,
        v_scale=b.scale if fp8 else None,
        workspace=workspace,
        tuning=tuning,
    )


def workspace_for(case: Case, programs: int | None = None) -> VerifyWorkspace:
    """A workspace that this case fits."""
    return VerifyWorkspace.create(
        max_requests=case.requests,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_query_len=case.window,
        device=torch.device("cuda", torch.cuda.current_device()),
        programs=programs,
    )


def flash_call(buffers: Buffers) -> Call:
    """One call of FlashAttention 3 with metadata made beforehand, as under vLLM's full graphs."""
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    b, case = buffers, buffers.case
    splits = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
    metadata = get_scheduler_metadata(
        batch_size=case.requests,
        max_seqlen_q=case.window,
        max_seqlen_k=MAX_SEQ_LEN,
        num_heads_q=case.heads,
        num_heads_kv=case.kv_heads,
        headdim=case.head_dim,
        cache_seqlens=b.seq_lens,
        qkv_dtype=b.query.dtype,
        cu_seqlens_q=b.starts,
        page_size=case.block_size,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )
    key, value = b.cache.transpose(1, 2).split(case.head_dim, dim=-1)
    scale = b.scale.expand(case.requests, case.kv_heads) if case.cache == "fp8" else None
    return lambda: flash_attn_varlen_func(
        q=b.query,
        k=key,
        v=value,
        out=b.output,
        cu_seqlens_q=b.starts,
        max_seqlen_q=case.window,
        seqused_k=b.seq_lens,
        max_seqlen_k=MAX_SEQ_LEN,
        softmax_scale=case.head_dim**-0.5,
        causal=True,
        block_table=b.table,
        scheduler_metadata=metadata,
        num_splits=splits,
        q_descale=scale,
        k_descale=scale,
        v_descale=scale,
        fa_version=3,
    )


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all the calls, after each was made once eagerly."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def us_of(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds a call of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval from order statistics (no distribution assumed)."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return ordered[count // 2], ordered[low], ordered[high]


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, turns: int) -> dict[str, list]:
    """Microseconds a call of each graph, in every turn; the first ones warm up."""
    times: dict[str, list] = {name: [] for name in graphs}
    for turn in range(turns + 3):
        for name, graph in graphs.items():
            us = us_of(graph, calls)
            if turn >= 3:
                times[name].append(us)
    return times


def error_of(buffers: Buffers, call: Call, expected: Tensor) -> float:
    """Relative error of a call's output, which is NaN where it was not written."""
    buffers.output.fill_(float("nan"))
    call()
    return float((buffers.output.double() - expected.double()).norm() / expected.double().norm())


def buffer_sets(case: Case) -> list[Buffers]:
    """Enough sets that going round them leaves nothing of the first in L2."""
    return [Buffers.make(case) for _ in range(max(2, -(-COLD_BYTES // case.kv_bytes)))]


def measure(case: Case, turns: int) -> dict[str, object]:
    """One row of the result: errors, then times."""
    sets = buffer_sets(case)
    workspace = workspace_for(case)
    expected = sets[0].expected()
    ours = [our_call(each, workspace) for each in sets]
    flash = [flash_call(each) for each in sets]
    sets[0].poison_window()
    errors = {"error": error_of(sets[0], ours[0], expected)}
    sets[0].write_window()
    errors["flash_error"] = error_of(sets[0], flash[0], expected)
    repeats = max(1, 16 // len(sets))
    graphs = {"ours": captured(ours * repeats), "flash": captured(flash * repeats)}
    times = interleaved(graphs, len(sets) * repeats, turns)
    ratios = [flash / ours for ours, flash in zip(times["ours"], times["flash"], strict=True)]
    us, us_low, us_high = median_interval(times["ours"])
    ratio, low, high = median_interval(ratios)
    return {
        **asdict(case),
        **errors,
        "us": us,
        "us_low": us_low,
        "us_high": us_high,
        "flash_us": median_interval(times["flash"])[0],
        "speed_to_flash": ratio,
        "speed_low": low,
        "speed_high": high,
        "tb_per_s": case.kv_bytes / us / 1e6,
        "right": errors["error"] < TOLERANCE[case.cache],
    }


HEADER = (
    "requests", "context", "drafts", "cache", "block", "us", "TB/s", "FA3 us",
    "speed to FA3 [95 %]", "error", "FA3's error",
)  # fmt: skip


def cells_of(row: dict[str, object]) -> list[str]:
    """One row as text, under HEADER."""
    form = (
        "{requests}|{context}|{drafts}|{cache}|{block_size}|{us:.1f}|{tb_per_s:.2f}|{flash_us:.1f}"
        "|{speed_to_flash:.3f} [{speed_low:.3f}, {speed_high:.3f}]|{error:.1e}|{flash_error:.1e}"
    )
    return form.format(**row).split("|")


def table(rows: list[dict[str, object]]) -> str:
    """Markdown, aligned so that it can be read on a terminal too."""
    lines = [list(HEADER), *map(cells_of, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "".join(
        f"| {' | '.join(cell.rjust(n) for cell, n in zip(line, widths, strict=True))} |\n"
        for line in lines
    )


def document(rows: list[dict[str, object]], machine: str, turns: int) -> str:
    """The whole Markdown page."""
    command = shlex.join(["python", *sys.argv])
    return (
        f"# verify_attention against one-pass FlashAttention 3\n\n```\n{command}\n```\n\n"
        f"{machine}. CUDA graphs, cold L2; medians of {turns} turns, ratios within turns, their "
        f"95 % intervals from order statistics. Above 1 ours is faster.\n\n{table(rows)}"
    )


def write_csv(path: Path, rows: list[dict[str, object]], machine: dict[str, str]) -> None:
    """One line a case, full precision, the machine repeated in each."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*machine, *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**machine, **row} for row in rows)


def main() -> None:
    """Measure every case; print a table; write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", type=Path, metavar="STEM", help="writes STEM.csv and STEM.md")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(", ".join(machine.values()), flush=True)
    rows = []
    for case in CASES:
        rows.append(measure(case, arguments.turns))
        print(" ".join(cells_of(rows[-1])), flush=True)
    page = document(
        rows,
        f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}",
        arguments.turns,
    )
    print(page)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".md").write_text(page)
        write_csv(arguments.out.with_suffix(".csv"), rows, machine)
    if not all(row["right"] for row in rows):
        sys.exit("wrong results")


if __name__ == "__main__":
    main()
