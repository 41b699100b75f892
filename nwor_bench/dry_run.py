"""What `sweep --dry-run` says: the pair, the batches, and the order of the cells."""

from nwor_bench.config import SweepSpec
from nwor_bench.memory import GIB, kv_cache_bytes
from nwor_bench.pairs import ResolvedPair
from nwor_bench.plan import Plan

SHOWN_BLOCKS = 20
"""Blocks whose order a dry run prints."""


def plan_lines(plan: Plan, spec: SweepSpec, pair: ResolvedPair) -> list[str]:
    """The plan for people; cells are numbered, so that a block's order fits in one line."""
    scenario = spec.scenario
    numbers = {cell: number for number, cell in enumerate(plan.cells, start=1)}
    lines = [
        f"pair {pair.name}: {pair.method}, {spec.dtype or pair.dtype}, one engine start, "
        f"{kv_cache_bytes(pair, spec) / GIB:.2f} GiB of KV cache",
        f"scenario {scenario.name}: {scenario.requests} requests x "
        f"{scenario.max_new_tokens} new tokens, {scenario.draft_tokens} drafts",
        f"{_amount(plan, spec)}",
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


def _amount(plan: Plan, spec: SweepSpec) -> str:
    warmup = f"{plan.warmup} to {plan.max_warmup}"
    if plan.warmup == plan.max_warmup:
        warmup = f"{plan.warmup}"
    rule = spec.stopping
    blocks = f"{len(plan.blocks)}"
    if rule.ci_width is not None or rule.time_budget_s is not None:
        blocks = f"at most {len(plan.blocks)}"
    return (
        f"batches: {warmup} to warm up, {len(plan.cells)} for the gate, "
        f"{blocks} blocks x {len(plan.cells)} cells"
    )
