"""Output of `sweep --dry-run`: batches, cells, runs, engine starts, time and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nwor_bench.engine.memory import GIB, kv_cache_bytes, needed_bytes
from nwor_bench.instruments.device import free_memory, planned_card
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.types import AA, AttentionBy, StageBy
from nwor_bench.report.text import clock, plural
from nwor_bench.run.execute import Prepared
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.schedule import Plan
from nwor_bench.workload.sweep_file import EngineGroup, SweepFile


def plan_lines(plan: Plan, spec: RunSpec, pair: ResolvedPair) -> list[str]:
    """The plan for people."""
    scenario = spec.scenario
    counted = f"{spec.counted_blocks} x {len(plan.cells)} for DRAM counters"
    arms = len(spec.engine_specs)
    starts = f"{arms - 1} or {arms} engines, by memory" if arms > 1 else "one engine start"
    return [
        f"pair {pair.name}: {pair.method}, {spec.dtype or pair.dtype}, {starts}",
        _memory(pair, spec),
        f"scenario {scenario.name}: {scenario.requests} requests x "
        f"{scenario.max_new_tokens} new tokens, {scenario.draft_tokens} drafts",
        _batches(plan, spec),
        *_until(spec),
        *([f"untimed batches after them: {counted}"] if spec.counted_blocks else []),
        *_staging(spec),
        "cells (NWOR x SCV):",
        *(f"  {cell.label}" for cell in plan.cells),
    ]


def sweep_lines(
    sweep: SweepFile, groups: Sequence[EngineGroup], prepared: Mapping[int, Prepared]
) -> list[str]:
    """What a sweep file would run; `prepared` are its runs by number."""
    points = [point for group in groups for point in group.points]
    first = prepared[points[0].number]
    cells = replace(first.spec, engines_at_once=None).experiment.cells(first.pair.name)
    lines = [
        f"sweep {sweep.name}: {plural(len(points), 'run')}, engine starts: {len(groups)}",
        f"{len(cells)} cells{'' if sweep.axes.engines_at_once else ' a run'} (NWOR x SCV):",
        *(f"  {cell.label}" for cell in cells),
        *_staging(points[0].spec),
    ]
    for group in groups:
        pair = prepared[group.points[0].number].pair
        requests = f"up to {group.spec.scenario.requests} requests"
        each = "method" if group.spec.arms else "draft count"
        suffix = f", one for each {each}" if group.spec.engines else ""
        lines.append(f"engine {group.number}: {pair.name}, {requests}{suffix}")
        lines.append("  " + _memory(pair, group.spec))
        for point in group.points:
            plan, spec = prepared[point.number].plan, point.spec
            batches = plan.num_batches + spec.counted_blocks * len(plan.cells)
            lines.append(f"  run {point.number}: {point.label} ({batches:,} batches)")
    lines.append("the batches are the most that a run may have")
    budgets = [point.spec.time_budget_s for point in points]
    seconds = [budget for budget in budgets if budget is not None]
    if len(seconds) == len(budgets):
        lines.append(f"time: at most {clock(sum(seconds))} min, besides engine starts")
    return lines


def _memory(pair: ResolvedPair, spec: RunSpec) -> str:
    free = free_memory(spec.tensor_parallel_size)
    specs = spec.engine_specs
    engines = [(pair.of_arm(arm), engine) for arm, engine in specs.items() if arm != AA]
    cache = sum(kv_cache_bytes(own, engine) for own, engine in engines)
    needed = sum(needed_bytes(own, engine, free.where) for own, engine in engines)
    several = f" of {len(engines)} engines" if len(engines) > 1 else ""
    card = planned_card()
    has = "are free" if card is None or free.where == "host" else f"on each {card.label}"
    return (
        f"memory{several}: {_size(cache)} of KV cache, about {_size(needed)} in all, "
        f"{_size(free.num_bytes)} {has}"
    )


def _size(num_bytes: int) -> str:
    """`3.5 GiB`, or `12 MiB` of what is less than a tenth of one."""
    gib = num_bytes / GIB
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{1024 * gib:.1f} MiB"


def _batches(plan: Plan, spec: RunSpec) -> str:
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
    return f"{begin}interleaved, and {whole} x {len(plan.cells)} cells in whole batches as a check"


def _until(spec: RunSpec) -> list[str]:
    """What may end the run before its last block."""
    rule = spec.stopping
    ends = []
    if rule.ci_width is not None:
        ends.append(f"every interval within +- {100 * rule.ci_width:g} %")
    if rule.time_budget_s is not None:
        ends.append(f"{rule.time_budget_s:g} s after the engine's start")
    return [f"stops early: {', or '.join(ends)}"] if ends else []


def _staging(spec: RunSpec) -> list[str]:
    """How drafts are held and attended, if not the usual way."""
    held = [] if spec.stage_by is StageBy.REFERENCE else [f"mode stage: by {spec.stage_by}"]
    by = spec.attention
    return held if by is AttentionBy.AUTO else [*held, f"attention of windows: {by}"]
