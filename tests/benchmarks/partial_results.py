"""What becomes of the verification kernel's partial results: time, and bytes written to DRAM.

    python tests/benchmarks/partial_results.py --windows 8x4,64x8 --output /tmp/partials

Times are `nwor-bench kernels`' (interleaved rounds in CUDA graphs, L2 cold), with ways to tune our
kernel in the place of its peers; each must give our output bit for bit (whole pairs: but for
rounding). DRAM is counted over graphs in which every launch is followed by a read of more than L2
holds, as layers are by weights. `partials.md` and `partials.csv` hold both (`partial_table.py`).
Needs a GPU; the counters also need cupti-python, and with --no-dram there is no such table.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from dram_count import captured, dram_bytes, followed, reader
from partial_table import BACKGROUND, write_table
from rich.console import Console

from nwor_bench.instruments.pm_sampling import PmSampler
from nwor_bench.microbench import cuda_bench as cuda_device
from nwor_bench.microbench.attention import attention_implementations
from nwor_bench.microbench.bench import Bench
from nwor_bench.microbench.cases import L2, PEERS, Group, LaunchMode, Spec, expand, parse_windows
from nwor_bench.microbench.execute import require_cuda, run_kernels
from nwor_bench.microbench.implementation import Call, Implementation, Implementations
from nwor_kernels.verify_attention.kernel import Discard, Tuning

AS_IS = Tuning(discard=Discard.OFF, skip_padding=False, whole_pairs=0)
"""The kernel that keeps all partial results, `nwor` in the tables; the defaults are `all`."""

WAYS = {
    "discarded": replace(AS_IS, discard=Discard.L2),
    "unpadded": replace(AS_IS, skip_padding=True),
    "unpadded_discarded": replace(AS_IS, discard=Discard.L2, skip_padding=True),
    "whole_pairs": replace(AS_IS, whole_pairs=5),
    "all": Tuning(discard=Discard.L2, skip_padding=True, whole_pairs=5),
}
ROUNDING = 5e-3
"""Of bf16 outputs, relative to their norm."""

OUTPUT = 9
"""Which argument of the kernel's launch is the output."""


def tuned(ours: Implementation, tuning: Tuning) -> Implementation:
    """Our subject's launches with a tuning of their own."""
    calls = [partial(call, tuning=tuning) for call in ours.calls if isinstance(call, partial)]
    assert len(calls) == len(ours.calls)
    return replace(ours, calls=calls)


def variant(ours: Implementation, name: str, tuning: Tuning) -> Implementation:
    """Our subject in another way, held to what `ours` gives."""
    launches = [call for call in ours.calls if isinstance(call, partial)]
    calls = tuned(ours, tuning).calls
    output: torch.Tensor = launches[0].args[OUTPUT]

    def check() -> str:
        outputs = []
        for call in (launches[0], calls[0]):
            output.fill_(float("nan"))
            call()
            outputs.append(output.clone())
        if tuning.whole_pairs:  # sums are taken in another order
            far = (outputs[0].float() - outputs[1].float()).norm() / outputs[0].float().norm()
            return "" if far < ROUNDING else f"{far:.1e} from the kernel as it is"
        return "" if torch.equal(*outputs) else "not the bits of the kernel as it is"

    return Implementation(name, ours.launches, ours.bytes_moved, calls, check)


def make_contest(spec: Spec, group: Group) -> Implementations:
    """Our kernel as it is and each way to tune it, on the same buffers."""
    device = torch.device("cuda", torch.cuda.current_device())
    ours = tuned(attention_implementations(group, spec.shape, device, spec.seed).runnable[0], AS_IS)
    return Implementations((ours, *(variant(ours, name, WAYS[name]) for name in WAYS)), ())


def print_dram(sampler: PmSampler, spec: Spec, group: Group, replays: int) -> list[str]:
    """A line for reads alone (what else the GPU writes) and for each way; the lines."""
    weights = torch.ones(128 << 20, dtype=torch.uint8, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    spoil = reader(weights, total)
    subjects = make_contest(spec, group).runnable
    ways: dict[str, Sequence[Call]] = {BACKGROUND: [spoil] * len(subjects[0].calls)}
    ways |= {subject.name: subject.calls for subject in subjects}
    lines = []
    for name, calls in ways.items():
        graph = captured(*followed(calls, spoil))
        written = dram_bytes(sampler, graph.replay, replays).write / len(calls)
        megabytes = written * spec.shape.layers / 1e6
        lines.append(f"{group.label}: {name}: {megabytes:.1f} MB written to DRAM in a window")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Times, then bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", default="8x4,64x8")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--no-dram", action="store_true")
    options = parser.parse_args()
    require_cuda()
    PEERS["verify_attention"] = tuple(WAYS)
    spec = Spec(
        kernels=("verify_attention",), windows=parse_windows(options.windows),
        cache_dtypes=("bf16",), l2=(L2.COLD,), launch=(LaunchMode.GRAPH,),
        max_rounds=options.rounds, ci_width=0.002,
    )  # fmt: skip

    def make_bench(spec: Spec) -> tuple[Bench, dict[str, object]]:
        bench, facts = cuda_device.make_bench(spec)
        return replace(bench, build=partial(make_contest, spec)), facts

    code = run_kernels(Console(), spec, options.output, make_bench=make_bench)
    if code == 0 and not options.no_dram:
        sampler = PmSampler(torch.cuda.current_device())
        lines: list[str] = []
        try:
            for group in expand(spec):
                lines += print_dram(sampler, spec, group, options.replays)
        finally:
            sampler.close()
        write_table(options.output, lines, options.output)
    raise SystemExit(int(code))


if __name__ == "__main__":
    main()
