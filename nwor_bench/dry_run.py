"""What `sweep --dry-run` says: the pair, the batches, and the order of the cells."""

from nwor_bench.config import SweepSpec
from nwor_bench.memory import GIB, kv_cache_bytes
from nwor_bench.pairs import ResolvedPair
from nwor_bench.plan import Plan


def plan_lines(plan: Plan, spec: SweepSpec, pair: ResolvedPair) -> list[str]:
    """The plan for people; cells are numbered, so that a block's order fits in one line."""
    scenario = spec.scenario
    numbers = {cell: number for number, cell in enumerate(plan.cells, start=1)}
    lines = [
        f"pair {pair.name}: {pair.method}, {spec.dtype or pair.dtype}, one engine start, "
        f"{kv_cache_bytes(pair, spec) / GIB:.2f} GiB of KV cache",
        f"scenario {scenario.name}: {scenario.requests} requests x "
        f"{scenario.max_new_tokens} new tokens, {scenario.draft_tokens} drafts",
        f"{plan.num_batches} batches: {plan.warmup} to warm up, {len(plan.cells)} for the gate, "
        f"{len(plan.blocks)} blocks x {len(plan.cells)} cells",
        "cells (NWOR x SCV):",
        *(f"  {number}  {cell.label}" for cell, number in numbers.items()),
        "order:",
    ]
    for block, name in ((plan.gate, "gate"), *((b, f"block {b.number}") for b in plan.blocks)):
        lines.append(f"  {name}: " + " ".join(str(numbers[cell]) for cell in block.order))
    return lines
