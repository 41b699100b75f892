"""What `sweep --dry-run` prints: batches and their order, runs, engine starts, time and memory.

Time is an estimate. A window reads the models' weights once and computes every draft token, so it
takes the longer of the two, at this machine's bandwidth and speed (NVML's figures on a GPU, a trial
of a tenth of a second on a CPU). Half of the drafts are assumed to be accepted. Attention, sampling
and the drafter's host time are left out, so a sweep takes longer.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nwor_bench.engine.memory import GIB, kv_cache_bytes, needed_bytes
from nwor_bench.errors import BenchError
from nwor_bench.instruments.device import free_memory
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs import ResolvedPair, read_model_config
from nwor_bench.records.types import Interleave, Phase, ScvMode, StageBy
from nwor_bench.report.text import plural
from nwor_bench.run.execute import Prepared
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.run_spec import AXES, WARMUP_LOOKBACK
from nwor_bench.workload.schedule import CHECK_BLOCKS, Plan
from nwor_bench.workload.sweep_file import EngineGroup, Point, SweepFile

ENGINE_START_S = 15.0
"""A later start on a GPU takes 16 s, one on a CPU 4 to 10; a machine's first may take 140."""

PREFILL_WINDOWS = 2
"""The prompts' prefill and what surrounds a batch, in windows."""

_ELEMENT_BYTES = {"float32": 4}
_GPU_HOST_S, _CPU_HOST_S = 0.002, 0.008
"""Host time a window that no model size explains: seen on an H200 and on two CPU cores."""


@dataclass(frozen=True)
class Machine:
    """Bytes a second from memory, and operations a second (None: not what limits it)."""

    bytes_per_s: float
    flops: float | None


def this_machine() -> Machine:
    """The first GPU's memory bandwidth as NVML tells it, else a short trial on the CPU."""
    bandwidth = _gpu_bandwidth()
    return Machine(bandwidth, None) if bandwidth is not None else _try_cpu()


def batch_seconds(pair: ResolvedPair, spec: RunSpec, machine: Machine) -> float | None:
    """About how long one batch takes; None for a model whose size is not known here."""
    sizes = [_parameters(model) for model in (pair.target, pair.draft) if model]
    if None in sizes:
        return None
    target, *draft = [float(size) for size in sizes if size is not None]
    scenario = spec.scenario
    drafts = scenario.draft_tokens
    # The drafter runs once a draft token, the target once a window on all of them.
    bytes_read = (target + drafts * sum(draft)) * _ELEMENT_BYTES.get(spec.dtype or pair.dtype, 2)
    operations = 2 * scenario.requests * ((drafts + 1) * target + drafts * sum(draft))
    window = bytes_read / machine.bytes_per_s
    if machine.flops is not None:
        window = max(window, operations / machine.flops)
    windows = scenario.max_new_tokens / (1 + drafts / 2) + PREFILL_WINDOWS
    host = _GPU_HOST_S if machine.flops is None else _CPU_HOST_S
    return windows * (window + host)


def run_seconds(pair: ResolvedPair, spec: RunSpec, machine: Machine) -> float | None:
    """About how long one run measures, engine start aside; at most, where a rule may end it."""
    each = batch_seconds(pair, spec, machine)
    if each is None:
        return spec.time_budget_s
    cells = spec.cells(pair.name)
    # On a CPU no SCV mode can fire: such cells run in the gate alone.
    live = [c for c in cells if machine.flops is None or c.scv_mode is ScvMode.OFF]
    least, most = spec.warmup_batches
    blocks = spec.stopping.max_blocks
    interleaved = 1 + blocks if spec.interleave is Interleave.WINDOWS else 0
    whole = min(blocks, len(CHECK_BLOCKS)) if interleaved else blocks
    whole += sum(spec.counted_blocks.values())
    warmup = max(least, min(WARMUP_LOOKBACK, most))
    batches = whole * len(live) + interleaved + len(cells) + warmup
    seconds = batches * each
    return seconds if spec.time_budget_s is None else min(seconds, spec.time_budget_s)


def duration(seconds: float | None) -> str:
    """`40 s`, `12 min`, `3.5 h`; `unknown` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _parameters(model: str) -> int | None:
    config = read_model_config(model)
    if config is None:
        return None
    try:
        return read_shape(config, "model", model).parameters()
    except BenchError:
        return None


def _gpu_bandwidth() -> float | None:
    """Bus width x highest memory clock x 2 (double data rate), in bytes a second."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        clock_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        return 2e6 * clock_mhz * pynvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
    except pynvml.NVMLError:
        return None


def _try_cpu() -> Machine:
    """The best of a few copies and matrix products, as torch's are as fast as numpy's."""
    import numpy as np

    source = np.ones(1 << 24, dtype=np.float32)
    target = np.empty_like(source)
    square = np.ones((768, 768), dtype=np.float32)
    copies, products = [], []
    for _ in range(3):
        started = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - started)
        started = time.perf_counter()
        square @ square
        products.append(time.perf_counter() - started)
    return Machine(2 * source.nbytes / min(copies), 2 * 768**3 / min(products))


SHOWN_BLOCKS = 20
"""Blocks whose order a dry run prints."""

COLUMNS = ("run", "scenario", "requests", "temperature", "blocks", "batches", "about")
"""Of a sweep's table. What else tells runs apart is told of their engine."""

WIDTH = 80
"""Columns of a terminal."""


def plan_lines(plan: Plan, spec: RunSpec, pair: ResolvedPair) -> list[str]:
    """The plan for people; cells are numbered, so that a block's order fits in one line."""
    scenario = spec.scenario
    numbers = {cell: number for number, cell in enumerate(plan.cells, start=1)}
    lines = [
        f"pair {pair.name}: {pair.method}, {spec.dtype or pair.dtype}, one engine start",
        _memory(pair, spec),
        f"scenario {scenario.name}: {scenario.requests} requests x "
        f"{scenario.max_new_tokens} new tokens, {scenario.draft_tokens} drafts",
        _time(pair, spec),
        _amount(plan, spec),
        *_until(spec),
        *_counted(plan, spec),
        *_staging(spec),
        "cells (NWOR x SCV):",
        *(f"  {number}  {cell.label}" for cell, number in numbers.items()),
        "order:",
    ]
    for block in (plan.gate, *plan.blocks[:SHOWN_BLOCKS]):
        name = f"block {block.number}" if block.number else "gate"
        lines.append(f"  {name}: " + " ".join(str(numbers[cell]) for cell in block.order))
    if len(plan.blocks) > SHOWN_BLOCKS:
        lines.append(f"  ... and so on, to block {len(plan.blocks)} at most")
    return lines


def sweep_lines(
    sweep: SweepFile, groups: Sequence[EngineGroup], prepared: Mapping[int, Prepared]
) -> list[str]:
    """What a sweep file would run; `prepared` are its runs by number."""
    machine = this_machine()
    points = [point for group in groups for point in group.points]
    spent = {p.number: run_seconds(prepared[p.number].pair, p.spec, machine) for p in points}
    cells = [cell.label for cell in prepared[points[0].number].plan.cells]
    rows = {p.number: _row(p, prepared[p.number].plan, spent[p.number]) for p in points}
    table = [COLUMNS, *rows.values()]
    widths = [max(len(row[place]) for row in table) for place in range(len(COLUMNS))]
    lines = [
        f"sweep {sweep.name}: {plural(len(points), 'run')}, engine starts: {len(groups)}",
        *_listed(f"{len(cells)} cells a run: ", cells),
        *_staging(points[0].spec),
        _aligned(COLUMNS, widths),
    ]
    for group in groups:
        pair = prepared[group.points[0].number].pair
        lines += [_engine(group, pair), "  " + _memory(pair, group.spec)]
        lines += [_aligned(rows[point.number], widths) for point in group.points]
    known = [seconds for seconds in spent.values() if seconds is not None]
    whole = sum(known) + ENGINE_START_S * len(groups) if len(known) == len(points) else None
    return [
        *lines,
        "blocks and batches are the most that a run may have, and the time is theirs",
        f"about {duration(whole)} in all, if half of the drafts are accepted and windows are bound "
        f"by weights at {machine.bytes_per_s / 1e9:.0f} GB/s; often longer",
    ]


def _row(point: Point, plan: Plan, seconds: float | None) -> tuple[str, ...]:
    scenario = point.spec.scenario
    counted = sum(point.spec.counted_blocks.values()) * len(plan.cells)
    return (
        str(point.number),
        scenario.name,
        str(scenario.requests),
        f"{scenario.temperature:g}",
        str(point.spec.stopping.max_blocks),
        str(plan.num_batches + counted),
        duration(seconds),
    )


def _listed(start: str, words: Sequence[str]) -> list[str]:
    """The words after `start`, with a new line only between two of them."""
    lines = [start]
    for word in (*(f"{word}, " for word in words[:-1]), *words[-1:]):
        if len(lines[-1]) + len(word.rstrip()) > WIDTH:
            lines.append("  ")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    cells = zip(COLUMNS, row, widths, strict=True)
    text = [t.ljust(w) if name in ("scenario", "about") else t.rjust(w) for name, t, w in cells]
    return ("  " + "  ".join(text)).rstrip()


def _engine(group: EngineGroup, pair: ResolvedPair) -> str:
    words = group.points[0].words
    parts = [
        f"engine {group.number}: {pair.name}",
        group.spec.dtype or pair.dtype,
        words["draft_tokens"],
        f"up to {group.spec.scenario.requests} requests",
    ]
    told = ("dtype", "draft_tokens")
    own = [option.name for option, axis in AXES if not axis.shares_engine]
    parts += [words[name] for name in own if name in words and name not in told]
    return ", ".join(parts)


def _memory(pair: ResolvedPair, spec: RunSpec) -> str:
    free = free_memory(spec.tensor_parallel_size)
    return (
        f"memory: {_size(kv_cache_bytes(pair, spec))} of KV cache, about "
        f"{_size(needed_bytes(pair, spec, free.where))} in all, {_size(free.num_bytes)} are free"
    )


def _size(num_bytes: int) -> str:
    """`3.5 GiB`, or `12 MiB` of what is less than a tenth of one."""
    gib = num_bytes / GIB
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{1024 * gib:.1f} MiB"


def _amount(plan: Plan, spec: RunSpec) -> str:
    warmup = f"{plan.warmup} to {plan.max_warmup}"
    if plan.warmup == plan.max_warmup:
        warmup = f"{plan.warmup}"
    rule = spec.stopping
    blocks = f"{len(plan.blocks)}"
    if rule.ci_width is not None or rule.time_budget_s is not None:
        blocks = f"at most {len(plan.blocks)}"
    begin = f"batches: {warmup} to warm up, {len(plan.cells)} for the gate, {blocks} "
    if not plan.interleaved:
        return f"{begin}blocks x {len(plan.cells)} cells"
    whole = sum(map(plan.has_whole_batches, plan.blocks))
    return (
        f"{begin}interleaved (cells take turns in each), and {whole} whole ones of each of "
        f"{len(plan.cells)} cells as a check"
    )


def _until(spec: RunSpec) -> list[str]:
    """What may end the run before its last block."""
    rule = spec.stopping
    ends = []
    if rule.ci_width is not None:
        ends.append(f"every interval within +- {100 * rule.ci_width:g} %")
    if rule.time_budget_s is not None:
        ends.append(f"{rule.time_budget_s:g} s after the engine's start")
    return [f"stops early: {', or '.join(ends)}"] if ends else []


def _time(pair: ResolvedPair, spec: RunSpec) -> str:
    """How long the whole run takes."""
    seconds = run_seconds(pair, spec, this_machine())
    if seconds is None:
        return "time: unknown, as the size of the models is"
    most = "at most " if spec.time_budget_s is not None else ""
    start = duration(ENGINE_START_S)
    return f"time: {most}about {duration(seconds + ENGINE_START_S)}, {start} of it to start"


def _counted(plan: Plan, spec: RunSpec) -> list[str]:
    """The blocks that run once more for counters."""
    names = {Phase.COUNTERS: "DRAM counters", Phase.LAUNCHES: "launch counts"}
    parts = [
        f"{blocks} x {len(plan.cells)} for {names[phase]}"
        for phase, blocks in spec.counted_blocks.items()
        if blocks
    ]
    return [f"untimed batches after them: {', '.join(parts)}"] if parts else []


def _staging(spec: RunSpec) -> list[str]:
    """How drafts are held, where that is not the usual way."""
    if spec.stage_by is StageBy.REFERENCE:
        return []
    return [f"mode stage: by {spec.stage_by}"]
