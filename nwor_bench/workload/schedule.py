"""The plan of a run: its batches in order, drawn from a seed before anything starts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from nwor_bench.records.header import BlockEntry
from nwor_bench.records.types import Cell
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Prompt, select_blocks

GATE_BLOCK = 0
"""Number of the block on which parity is checked; timed blocks count from 1."""


@dataclass(frozen=True)
class Block:
    """One set of prompts on which every cell runs once, in this order."""

    number: int
    order: tuple[Cell, ...]
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Plan:
    """A sweep's batches: untimed ones, the gate (baseline first), the timed blocks.

    There are `warmup` to `max_warmup` untimed batches, and the stopping rule may skip the last
    blocks.
    """

    cells: tuple[Cell, ...]
    warmup: int
    max_warmup: int
    gate: Block
    blocks: tuple[Block, ...]

    @property
    def baseline(self) -> Cell:
        """The cell off x off."""
        return next(cell for cell in self.cells if cell.is_baseline)

    @property
    def num_batches(self) -> int:
        """All batches that may run, warm-up and gate included."""
        return self.max_warmup + len(self.cells) * (1 + len(self.blocks))


def make_plan(spec: RunSpec, pair_name: str, prompts: Sequence[Prompt]) -> Plan:
    """Randomised complete blocks: every cell once a block, in an order drawn per block.

    The same spec, prompts and seed give the same plan. In the gate the baseline runs first,
    since the other cells are compared with it.
    """
    cells = spec.cells(pair_name)
    scenario = spec.scenario
    most = spec.stopping.max_blocks
    chosen = select_blocks(prompts, scenario.requests, 1 + most, spec.seed)

    def block(number: int) -> Block:
        order = sorted(cells, key=lambda cell: not cell.is_baseline)
        if number != GATE_BLOCK:
            Random(f"{spec.seed}:order:{number}").shuffle(order)
        return Block(number, tuple(order), tuple(chosen[number]))

    gate, *timed = map(block, range(1 + most))
    return Plan(cells, *spec.warmup_batches, gate, tuple(timed))


def blocks_for_header(plan: Plan) -> tuple[BlockEntry, ...]:
    """Each block's number, cell order and prompts, for run.json."""
    return tuple(
        BlockEntry(
            block=block.number,
            order=tuple(cell.label for cell in block.order),
            prompt_ids=tuple(prompt.id for prompt in block.prompts),
        )
        for block in (plan.gate, *plan.blocks)
    )
