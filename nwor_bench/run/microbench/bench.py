"""Run `nwor-bench kernels`: check every contender, time it in rounds, write the files.

In a round every contender runs once, in random order. They are compared within a round, when clocks
and other load on the GPU were the same. `nwor_bench.workload.stopping` decides when to stop, only
from the width of the intervals.
"""

import gc
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments import environment
from nwor_bench.instruments.conditions import ConditionMonitor
from nwor_bench.records import files
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.run.microbench import report
from nwor_bench.run.microbench.cases import ON_A_GPU, OURS, PEER, InputGroup, Spec, expand
from nwor_bench.run.microbench.report import KernelRow, Status
from nwor_bench.workload.stopping import FIRST_LOOK, StoppingRule

SAMPLE_MS = 2
"""Replays of a contender in one round; their median is the round's time."""

Call = Callable[[], object]
Replay = Callable[[], float]
"""Times a contender in one round, in us a call."""


@dataclass(frozen=True)
class Contender:
    """One implementation of a kernel's work, in one group."""

    name: str
    bytes_moved: int
    """Bytes that a call must read and write."""
    bind: Callable[[], Sequence[Call]]
    """Makes a call for each set of inputs."""
    check: Callable[[Call], str]
    """Makes the first call on poisoned outputs; returns its fault, or an empty string."""
    one_row: "Contender | None" = None
    """Work without drafts, with which the time is compared; None: with our kernel's."""


@dataclass(frozen=True)
class Bench:
    """What times the groups."""

    spec: Spec
    contenders: Callable[[InputGroup], Sequence[Contender]]
    """Makes a group's inputs, ours first; raises OutOfMemoryError if they do not fit."""
    timer: Callable[[Sequence[Call]], Replay]
    throttled_ms: Callable[[], float | None] = lambda: None
    """Time so far in which power or temperature lowered the clocks; None: unknown."""


def run_groups(bench: Bench, groups: Iterable[InputGroup]) -> list[KernelRow]:
    """All rows of all groups."""
    rng = random.Random(bench.spec.seed)
    return [row for group in groups for row in _run_group(bench, group, rng)]


def _run_group(bench: Bench, group: InputGroup, rng: random.Random) -> list[KernelRow]:
    try:
        contenders = bench.contenders(group)
    except torch.OutOfMemoryError:
        refusal = {"status": Status.REFUSED, "reason": "its inputs do not fit the GPU's memory"}
        names = (OURS, PEER[group.kernel]) if group.kernel in PEER else ("every backend",)
        return [_row(group, name, refusal) for name in names]
    parts = [part for whole in contenders for part in (whole.one_row, whole) if part]
    ready = {part.name: _prepare(bench, part) for part in parts}
    replays = {name: prepared for name, prepared in ready.items() if callable(prepared)}
    rounds = bench.spec.max_rounds
    rule = StoppingRule(min(FIRST_LOOK, rounds), rounds, bench.spec.ci_width)
    before = bench.throttled_ms()
    times = run_rounds(replays, rule, rng)
    throttled = (bench.throttled_ms() or 0) > (before or 0)
    remark = {"reason": "the GPU throttled its clocks" if throttled else ""}
    rows = []
    for contender in contenders:
        both = [ready[part.name] for part in (contender.one_row, contender) if part]
        failed = next((prepared for prepared in both if not callable(prepared)), None)
        columns = failed or _measured(contender, times) | remark
        rows.append(_row(group, contender.name, columns))
    return rows


def _prepare(bench: Bench, contender: Contender) -> Replay | dict[str, Any]:
    """A replay of a contender whose result is right, or columns that say why it is not timed.

    An error refuses a peer, and stops the run if it is ours and memory was enough.
    """
    try:
        calls = contender.bind()
        wrong = contender.check(calls[0])
        return {"status": Status.INVALID, "reason": wrong} if wrong else bench.timer(calls)
    except Exception as error:
        if contender.name == OURS and not isinstance(error, torch.OutOfMemoryError):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        return {"status": Status.REFUSED, "reason": f"{type(error).__name__}: {first}"[:200]}


def run_rounds(
    replays: Mapping[str, Replay], rule: StoppingRule, rng: random.Random
) -> dict[str, list[float]]:
    """Times in us of each contender of one group, by name."""
    names = list(replays)
    times: dict[str, list[float]] = {name: [] for name in names}
    for done in range(1, rule.max_blocks + 1):
        rng.shuffle(names)
        for name in names:
            times[name].append(replays[name]())
        if done in rule.looks and rule.stop(done, report.half_widths(times), 0.0, 0.0):
            break
    return times


def _measured(contender: Contender, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    samples, moved = times[contender.name], contender.bytes_moved
    columns = {"status": Status.OK, "rounds": len(samples), "bytes_moved": moved}
    columns |= {"time_us": median(samples), "gb_per_s": moved / median(samples) / 1e3}
    ratio = report.ratios(times).get(contender.name)
    bounded = ratio if ratio and ratio.is_bounded else None
    if (one := contender.one_row) is None:
        return columns | {"ratio": bounded}
    return columns | {"one_row_us": median(times[one.name]), "over_one_row": bounded}


def _row(group: InputGroup, name: str, columns: Mapping[str, Any]) -> KernelRow:
    return KernelRow(
        kernel=group.kernel,
        implementation=name,
        cache_dtype=group.cache_dtype,
        requests=group.window.requests,
        drafts=group.window.drafts,
        acceptance=group.acceptance,
        context=group.context,
        staged_tokens=group.window.tokens,
        heads=str(group.heads) if group.heads else None,
        **columns,
    )


def run_kernels(
    console: Console,
    spec: Spec,
    output: Path | None,
    *,
    quiet: bool = False,
    as_json: bool = False,
    make_bench: Callable[[Spec], tuple[Bench, dict[str, Any]]] | None = None,
) -> int:
    """Measure, write the files to `output` (None: runs/<UTC time>-kernels) and print them.

    `make_bench` makes the bench and facts about the device; None: `cuda_bench`. Returns the exit
    code. Raises ConfigError without a CUDA device, and for a folder that cannot be written.
    """
    folder = output or files.default_folder(files.RUNS, "kernels", "", datetime.now(UTC))
    files.check_output(folder)
    begun = perf_counter()
    bench, facts = (make_bench or cuda_bench)(spec)
    hidden = quiet or as_json or not console.is_terminal
    groups = track(expand(spec), "Cases", console=console, transient=True, disable=hidden)
    rows = run_groups(bench, groups)
    command = shlex.join(["nwor-bench", *sys.argv[1:]])
    elapsed_s = perf_counter() - begun
    result = report.Result(spec, rows, command, facts, environment.collect(), elapsed_s)
    folder.mkdir(parents=True, exist_ok=True)
    written = report.write_files(folder, result)
    if as_json:
        named = {"folder": str(folder), "files": list(map(str, written))}
        sys.stdout.write(files.result_document(named | report.json_content(result)))
    else:
        print_document(console, report.document(result).shortened(), quiet=quiet)
        print_path(console, "Files", ", ".join(map(str, written)))
    return ExitCode.CORRECTNESS_BROKEN if result.invalid else ExitCode.OK


def cuda_bench(spec: Spec) -> tuple[Bench, dict[str, Any]]:
    """The bench on the current CUDA device, and facts about that device for the report."""
    if not torch.cuda.is_available():
        problem = f"needs a CUDA device and PyTorch {torch.__version__} sees none"
        raise ConfigError(f"kernels {problem}: {ON_A_GPU}")
    from triton.testing import do_bench

    from nwor_bench.run.microbench.contenders import contenders

    def make(group: InputGroup) -> Sequence[Contender]:
        gc.collect()  # graphs hold a group's buffers until they are collected
        torch.cuda.empty_cache()
        torch.manual_seed(spec.seed)
        with torch.device("cuda"):
            return contenders(group, group.shape(spec.shape))

    size = 1 << 31  # far larger than L2: the device's maximum, bytes read and written
    source, target = torch.ones(2, size, dtype=torch.uint8, device="cuda")
    copy_ms = float(do_bench(lambda: target.copy_(source), return_mode="min"))
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "l2_bytes": torch.cuda.get_device_properties().L2_cache_size,
        "copy_gb_per_s": 2 * size / copy_ms / 1e6,
    }
    monitor = ConditionMonitor(gpus=True)
    return Bench(spec, make, graph_timer, lambda: monitor.end().get("gpu_throttled_ms")), facts


def graph_timer(calls: Sequence[Call]) -> Replay:
    """Replays of a CUDA graph of all calls; Triton's `do_bench` empties L2 before each."""
    from triton.testing import do_bench

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay() -> float:  # it holds the calls, whose tensors the graph reads
        ms = do_bench(graph.replay, warmup=1, rep=SAMPLE_MS, return_mode="median")
        return float(ms) * 1000 / len(calls)

    replay()  # lack of memory shows before the rounds
    return replay
