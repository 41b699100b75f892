"""The plan of a run: its batches in order, drawn from a seed before anything starts. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

from nwor_bench.errors import ConfigError
from nwor_bench.records.header import BlockEntry
from nwor_bench.records.types import Cell, Interleave, NworMode
from nwor_bench.records.window_order import WindowOrder, compared_pairs
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Encode, Prompt

CHECK_BLOCKS = (1, 8, 16)
"""Blocks in which every cell also runs a whole batch if cells are interleaved within batches: their
ratio checks that of windows. Three are what an interval needs; a short run has its first, its
middle and its last block checked. A time budget may leave room for fewer."""

BLOCKS_A_TEXT = 16
"""Neighbouring blocks of interleaved windows that share their prompts if these have a set length,
so that the text is not what is measured: all but the first take contexts from the prefix cache. At
64 requests of 1,024 tokens a prefill takes as long as 150 windows."""

MAX_CHECKED_TOKENS = 64
"""Tokens that a request generates at most where every cell has a batch of its own beside
interleaved ones, and in the gate of a timed run: enough windows for every change of six cells in
one interleaved batch of the gate at 2.6 tokens a window."""

GATE_BLOCK = 0
"""Number of the block on which parity is checked; timed blocks count from 1."""


@dataclass(frozen=True)
class Block:
    """One set of prompts on which every cell runs once, in this order."""

    number: int
    order: tuple[Cell, ...]
    prompts: tuple[Prompt, ...]
    lengths: tuple[int, ...] | None = None
    """Tokens that each prompt is cut to; None: all are whole."""
    new_tokens: int | None = None
    """Tokens that a request generates; None: the scenario's max_new_tokens."""

    def token_ids(self, encode: Encode) -> list[list[int]]:
        """Token ids of each prompt. A cut one has its first token, in which attention may sink, and
        its last ones, so that it ends as it should."""
        encoded = encode(self.prompts)
        if self.lengths is None:
            return encoded
        return [
            ids if len(ids) <= length else [ids[0], *ids[len(ids) - length + 1 :]]
            for ids, length in zip(encoded, self.lengths, strict=True)
        ]


@dataclass(frozen=True)
class Plan:
    """A sweep's batches: untimed ones, the gate (baseline first), the timed blocks.

    There are `warmup` to `max_warmup` untimed batches, and the stopping rule may skip the last
    blocks. If cells are interleaved within batches, every block has one such batch, and only the
    CHECK_BLOCKS have a whole batch of every cell.
    """

    cells: tuple[Cell, ...]
    warmup: int
    max_warmup: int
    gate: Block
    blocks: tuple[Block, ...]
    interleaved: bool = False
    seed: int = 0
    engines_differ: bool = False
    """Cells run on engines of their own."""

    def has_whole_batches(self, block: Block) -> bool:
        """True if every cell has a batch of its own in this block."""
        return not self.interleaved or block.number in _checked(len(self.blocks))

    def window_order(self, block: Block, cells: Sequence[Cell]) -> WindowOrder:
        """The order of these cells' windows in the block's interleaved batch; off x off is one."""
        seed = f"{self.seed}:windows:{block.number}"
        return WindowOrder(tuple(cells), compared_pairs(cells), seed)

    def shares_contexts(self, block: Block) -> bool:
        """True if the block's interleaved batch may take its contexts from the prefix cache, in
        which the block before it has left them. A block with whole batches fills it anew: its
        interleaved batch is compared with them."""
        if block.number < 2 or self.has_whole_batches(block):
            return False
        return self.blocks[block.number - 2].prompts == block.prompts

    @property
    def baseline(self) -> Cell:
        """The cell off x off."""
        return next(cell for cell in self.cells if cell.is_baseline)

    @property
    def warmed(self) -> tuple[Cell, ...]:
        """The cells of each warm-up round, off x off last; others only if their engines differ."""
        others = tuple(cell for cell in self.cells if not cell.is_baseline)
        return (*others, self.baseline) if self.engines_differ else (self.baseline,)

    @property
    def num_batches(self) -> int:
        """All batches that may run, warm-up and gate included."""
        whole = sum(map(self.has_whole_batches, self.blocks))
        interleaved = 1 + len(self.blocks) if self.interleaved else 0
        warmup = self.max_warmup * len(self.warmed)
        last = any(cell.nwor_mode is not NworMode.OFF for cell in self.cells)  # of the gate
        return warmup + len(self.cells) * (1 + whole) + interleaved + last


def make_plan(spec: RunSpec, pair_name: str, prompts: Sequence[Prompt]) -> Plan:
    """Randomised complete blocks: every cell once a block, in an order drawn per block.

    The same spec, prompts and seed give the same plan. In the gate the baseline runs first,
    since the other cells are compared with it.
    """
    experiment = spec.experiment
    cells = experiment.cells(pair_name)
    scenario = spec.scenario
    most = spec.stopping.max_blocks
    interleaved = spec.interleave is Interleave.WINDOWS
    shares = interleaved and not experiment.compares_drafts and scenario.prompts.tokens is not None
    a_text = BLOCKS_A_TEXT if shares else 1
    texts = 1 + ceil(most / a_text)
    chosen = select_blocks(prompts, scenario.requests, texts, spec.seed)

    def block(number: int) -> Block:
        order = sorted(cells, key=lambda cell: not cell.is_baseline)
        if number != GATE_BLOCK:
            Random(f"{spec.seed}:order:{number}").shuffle(order)
        few = interleaved and number != GATE_BLOCK and number in _checked(most)
        new_tokens = min(scenario.max_new_tokens, MAX_CHECKED_TOKENS) if few else None
        text = chosen[ceil(number / a_text)]
        return Block(number, tuple(order), tuple(text), new_tokens=new_tokens)

    gate, *timed = map(block, range(1 + most))
    differ = experiment.asked_by is not None
    return Plan(cells, *spec.warmup_batches, gate, tuple(timed), interleaved, spec.seed, differ)


def _checked(blocks: int) -> tuple[int, int, int]:
    """Blocks with whole batches too, of so many with interleaved ones."""
    first, middle, end = CHECK_BLOCKS
    return first, min(middle, (blocks + 1) // 2), min(end, blocks)


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


def select_blocks(
    prompts: Sequence[Prompt], requests: int, blocks: int, seed: int
) -> list[list[Prompt]]:
    """The prompts of blocks 0 to `blocks` - 1, `requests` each, the same for every cell.

    Deterministic by (seed, block), for any number of blocks. Categories alternate. Within a block
    no prompt repeats while unused ones are left. Over the blocks the least used come first, so that
    later blocks have new text while any is left.
    """
    if not prompts:
        raise ConfigError("there are no prompts to choose from")
    used: Counter[str] = Counter()
    chosen: list[list[Prompt]] = []
    for block in range(blocks):
        chosen.append(_choose(prompts, requests, used, Random(f"{seed}:{block}")))
        used.update(prompt.id for prompt in chosen[block])
    return chosen


def _choose(
    prompts: Sequence[Prompt], requests: int, used: Mapping[str, int], random: Random
) -> list[Prompt]:
    queues: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: (used.get(p.id, 0), random.random())):
        queues[prompt.category].append(prompt)

    def uses(category: str) -> tuple[int, float]:
        return sum(used.get(p.id, 0) for p in queues[category]), random.random()

    categories = sorted(queues, key=uses)
    longest = max(map(len, queues.values()))
    alternating = [
        queues[category][place]
        for place in range(longest)
        for category in categories
        if place < len(queues[category])
    ]
    return [alternating[i % len(alternating)] for i in range(requests)]
