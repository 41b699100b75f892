"""What `sweep --dry-run` says: of one run its batches and their order, of a sweep file its runs,
engine starts, time and memory."""

from collections.abc import Mapping, Sequence

from nwor_bench.engine.memory import GIB, kv_cache_bytes, needed_bytes
from nwor_bench.instruments.device_memory import free_memory
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.types import Phase, StageBy
from nwor_bench.report.text import plural
from nwor_bench.run.estimate import ENGINE_START_S, duration, run_seconds, this_machine
from nwor_bench.run.execute import Prepared
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.run_spec import AXES
from nwor_bench.workload.schedule import Plan
from nwor_bench.workload.sweep_file import SweepFile
from nwor_bench.workload.sweep_points import EngineGroup, Point

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
