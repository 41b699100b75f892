"""Run `nwor-bench kernels`: check every implementation, time it in rounds, write the files.

In a round every implementation runs once, in random order. They are compared within a round, when
clocks and other load on the GPU were the same. `nwor_bench.workload.stopping` decides when to stop,
only from the width of the intervals.
"""

import random
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments import environment
from nwor_bench.microbench.cases import ON_A_GPU, OURS, PEER, Group, Spec, expand
from nwor_bench.microbench.report import document, json_content, write_files
from nwor_bench.microbench.rows import (
    Bench,
    Implementation,
    Implementations,
    Replay,
    Result,
    Row,
    Status,
    blank,
    describe,
    half_widths,
    timed_rows,
)
from nwor_bench.records.files import (
    RUNS,
    check_output,
    default_folder,
    not_writable,
    result_document,
)
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.workload.stopping import FIRST_LOOK, StoppingRule

WARMUP_ROUNDS = 2


def run_groups(
    bench: Bench, groups: Iterable[Group], on_group: Callable[[Group, list[Row]], None]
) -> list[Row]:
    """All rows of all groups; calls `on_group` after each group."""
    rows: list[Row] = []
    rng = random.Random(bench.spec.seed)
    for group in groups:
        found = _run_group(bench, group, rng)
        bench.release()
        rows += found
        on_group(group, found)
    return rows


def _run_group(bench: Bench, group: Group, rng: random.Random) -> list[Row]:
    try:
        built = bench.build(group)
    except MemoryError:
        reason = "its inputs do not fit the GPU's memory"
        built = Implementations((), dict.fromkeys((OURS, PEER[group.kernel]), reason))
    failed = {name: (Status.REFUSED, reason) for name, reason in built.refused.items()}
    sound = []
    for implementation in built.runnable:
        fault = fault_of(implementation)
        if fault is None:
            sound.append(implementation)
        else:
            failed[implementation.name] = fault
    timed, refused = _time(bench, group, sound, rng)
    failed |= refused
    rows = timed + [blank(group, name, *why) for name, why in failed.items()]
    return sorted(rows, key=lambda row: row.implementation != OURS)


def fault_of(implementation: Implementation) -> tuple[Status, str] | None:
    """Why an implementation is not timed, or None. An exception refuses a peer, and stops ours."""
    try:
        wrong = implementation.check()
    except Exception as error:
        if implementation.name == OURS:
            raise
        return Status.REFUSED, describe(error)
    return (Status.INVALID, wrong) if wrong else None


def _time(
    bench: Bench, group: Group, implementations: list[Implementation], rng: random.Random
) -> tuple[list[Row], dict[str, tuple[Status, str]]]:
    """The rows of one group, and the peer that could not be launched."""
    replays: dict[str, Replay] = {}
    refused: dict[str, tuple[Status, str]] = {}
    for each in implementations:
        try:
            replays[each.name] = bench.stopwatch.prepare(each)
        except Exception as error:
            if each.name == OURS:
                raise
            refused[each.name] = (Status.REFUSED, describe(error))
    if not replays:
        return [], refused
    before = bench.throttled_ms()
    times = run_rounds(replays, make_rule(bench.spec.max_rounds, bench.spec.ci_width), rng)
    after = bench.throttled_ms()
    timed = [each for each in implementations if each.name in replays]
    rows = timed_rows(group, timed, times)
    if before is not None and after is not None and after > before:
        rows = [replace(row, reason="the GPU throttled its clocks") for row in rows]
    return rows, refused


def make_rule(max_rounds: int, ci_width: float) -> StoppingRule:
    """At least FIRST_LOOK rounds, at most `max_rounds`; `ci_width` is relative."""
    return StoppingRule(
        blocks=min(FIRST_LOOK, max_rounds), max_blocks=max_rounds, ci_width=ci_width
    )


def run_rounds(
    replays: Mapping[str, Replay], rule: StoppingRule, rng: random.Random
) -> dict[str, list[float]]:
    """Times in us of each implementation of one group, by name."""
    names = list(replays)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(WARMUP_ROUNDS):
        for name in names:
            replays[name]()
    done = 0
    while done < rule.max_blocks:
        rng.shuffle(names)
        for name in names:
            times[name].append(replays[name]())
        done += 1
        if rule.stop(done, half_widths(times) if done in rule.looks else [], 0.0, 0.0):
            break
    return times


def run_kernels(
    console: Console,
    spec: Spec,
    output: Path | None,
    *,
    quiet: bool = False,
    as_json: bool = False,
    make_bench: Callable[[Spec], tuple[Bench, dict[str, Any]]] | None = None,
) -> int:
    """Measure, write the files and print them; returns the exit code.

    Args:
        output: folder for the files; None: runs/<UTC time>-kernels.
        quiet: print only the answer and the files.
        as_json: print one JSON document only.
        make_bench: makes the bench; None: the one on the current CUDA device.

    Raises:
        ConfigError: no CUDA device, or the files cannot be written to the folder.
    """
    folder = output or default_folder(RUNS, "kernels", "", datetime.now(UTC))
    check_output(folder)
    begun = perf_counter()
    bench, facts = (make_bench or _cuda_bench)(spec)
    groups = expand(spec)
    done = count(1)

    def on_group(group: Group, rows: list[Row]) -> None:
        if console.is_terminal and not quiet and not as_json:
            seconds = perf_counter() - begun
            line = f"[{next(done)}/{len(groups)}] {group.label} ({seconds:.0f} s)"
            console.print(line, markup=False)

    rows = run_groups(bench, groups, on_group)
    command = shlex.join(["nwor-bench", *sys.argv[1:]])
    elapsed_s = perf_counter() - begun
    result = Result(spec, rows, command, facts, environment.collect(), elapsed_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(folder, error) from error
    files = write_files(folder, result)
    if as_json:
        named = {"folder": str(folder), "files": list(map(str, files))}
        sys.stdout.write(result_document({**named, **json_content(result)}))
    else:
        print_document(console, document(result).shortened(), quiet=quiet)
        print_path(console, "Files", ", ".join(map(str, files)))
    return ExitCode.CORRECTNESS_BROKEN if result.invalid else ExitCode.OK


def _cuda_bench(spec: Spec) -> tuple[Bench, dict[str, Any]]:
    require_cuda()
    from nwor_bench.microbench.cuda_bench import make_bench

    return make_bench(spec)


def require_cuda() -> None:
    """Raise ConfigError unless PyTorch sees a CUDA device and Triton is installed."""
    try:
        import torch
        import triton
    except ImportError as error:
        raise ConfigError.at(f"kernels needs {error.name}", ON_A_GPU) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"kernels needs a CUDA device and PyTorch {torch.__version__} (Triton "
            f"{triton.__version__}) sees none: {ON_A_GPU}"
        )
