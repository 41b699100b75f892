"""Host time of one launch of the same bound kernel, in each way to launch it.

    python sweeps/studies/launches/measure.py [--output FILE.csv]

The commit of 8 windows of 5 rows in 28 layers, and the mask of those windows: by Triton's jit
function, by the compiled kernel (`compiled[grid]`, addresses as integers), by the driver directly,
by replaying a CUDA graph of it, and with a copy of the counts before the replay, by torch or by
the driver directly. Ways take turns; the device is waited for every 50 launches, outside the
times. `page.py` makes README.md of the CSV. Needs a GPU and no vLLM.
"""

import argparse
import csv
import platform
import sys
from collections.abc import Callable
from ctypes import c_size_t, c_uint64, c_void_p
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import triton

from nwor_bench.instruments.environment import collect
from nwor_kernels import launch
from nwor_kernels.commit import plan as commit_plan
from nwor_kernels.commit.sources import StagedSources
from nwor_kernels.direct_launch import load_driver, refusals
from nwor_kernels.mask import kernel as mask_kernel

REQUESTS, DRAFTS, LAYERS, HEADS, DIM, BLOCK_SIZE = 8, 4, 28, 8, 128, 16
BEFORE_A_WAIT = 50

Call = Callable[[], object]


class RecordedLaunch(launch.Launch):
    """A launch that keeps what it was bound to."""

    last: "RecordedLaunch"
    bound: tuple[tuple[Any, ...], int]

    def bind(self, *arguments: object, at: int) -> Callable[[torch.Tensor, int], None]:
        RecordedLaunch.last, self.bound = self, (arguments, at)
        return super().bind(*arguments, at=at)


def commit_run() -> Callable[[torch.Tensor], None]:
    """The bound commit of one window of every request."""
    tokens = REQUESTS * (DRAFTS + 1)
    shape = (REQUESTS, HEADS, BLOCK_SIZE, 2 * DIM)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    kv = torch.randn(2, LAYERS, tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(REQUESTS * BLOCK_SIZE, device="cuda")[:tokens]
    errors = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    plan, sources = commit_plan.CommitPlan(caches), StagedSources(list(kv[0]), list(kv[1]))
    run = plan.bind(sources, slots, errors, certain=0, tokens_per_request=DRAFTS + 1)
    alive = (caches, kv, plan)
    return lambda counts, alive=alive: run(counts)  # type: ignore[misc]


def mask_run() -> Callable[[torch.Tensor], None]:
    """The bound mask of the same windows."""
    mask = torch.empty(REQUESTS * DRAFTS, dtype=torch.bool, device="cuda")
    num_accepted = torch.empty(REQUESTS, dtype=torch.int32, device="cuda")
    return mask_kernel.bind_mask(mask, num_accepted, DRAFTS)


def ways_of(run: Callable[[torch.Tensor], None], number: int) -> dict[str, Call]:
    """Every way to launch what `run` launches; without the direct one where it is refused."""
    counts = torch.randint(0, DRAFTS + 2, (REQUESTS,), dtype=torch.int32, device="cuda")
    refused = sum(refusals.values())
    run(counts)
    is_direct = sum(refusals.values()) == refused
    recorded = RecordedLaunch.last
    fixed, at = recorded.bound
    arguments = (*fixed[:at], counts, *fixed[at:], number)
    kernel, grid, by_name = recorded._kernel, recorded._grid, recorded._by_name
    addresses = launch._addresses(arguments)
    compiled = recorded._compiled[grid]
    graph, kept = torch.cuda.CUDAGraph(), counts.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(kept)

    copy = load_driver().cuMemcpyDtoDAsync_v2
    copy.argtypes = [c_uint64, c_uint64, c_size_t, c_void_p]
    size, stream_of = kept.nbytes, torch._C._cuda_getCurrentRawStream
    device = torch.cuda.current_device()

    def copy_and_replay() -> None:
        kept.copy_(counts)
        graph.replay()

    def direct_copy_and_replay() -> None:
        copy(kept.data_ptr(), counts.data_ptr(), size, stream_of(device))
        graph.replay()

    ways: dict[str, Call] = {
        "jit": lambda: kernel[grid](*arguments, **by_name),
        "compiled": lambda: compiled(*addresses, *recorded._in_order),
        "direct": lambda: run(counts),
        "replay": graph.replay,
        "copy and replay": copy_and_replay,
        "direct copy and replay": direct_copy_and_replay,
    }
    if not is_direct:
        del ways["direct"]
    return ways


def time_in_turns(ways: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median microseconds of host time a launch."""
    times: dict[str, list[int]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, call in ways.items():
            torch.cuda.synchronize()
            for _ in range(BEFORE_A_WAIT):
                began = perf_counter_ns()
                call()
                ended = perf_counter_ns()
                if turn >= 2:  # the first ones warm up
                    times[name].append(ended - began)
    torch.cuda.synchronize()
    return {name: median(found) / 1e3 for name, found in times.items()}


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=80, help=f"{BEFORE_A_WAIT} launches each")
    parser.add_argument("--output", type=Path, metavar="FILE.csv")
    args = parser.parse_args()
    facts = {
        "python": platform.python_version(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "cpu": collect().cpu.model,
    }
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    for module in (commit_plan, mask_kernel):
        setattr(module, "Launch", RecordedLaunch)  # noqa: B010 - mypy forbids the assignment
    rows = []
    for kernel, run, number in (
        ("commit", commit_run(), REQUESTS),
        ("mask", mask_run(), REQUESTS * DRAFTS),
    ):
        for way, microseconds in time_in_turns(ways_of(run, number), args.rounds).items():
            print(f"{kernel:8}{way:24}{microseconds:8.2f} us")
            launches = args.rounds * BEFORE_A_WAIT
            row = {"kernel": kernel, "way": way, "median_us": microseconds, "launches": launches}
            rows.append({**row, **facts})
    for reason, times in refusals.items():
        print(f"refused: {reason} ({times} kernels)", file=sys.stderr)
    if args.output:
        with args.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
