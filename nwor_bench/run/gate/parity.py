"""The parity gate: compare every cell's tokens and acceptance with off x off.

Cells are compared on the gate's block and, at temperature 0, again on every timed block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nwor_bench.analysis.parity.acceptance import (
    SUMS_EVENT,
    ParitySums,
    acceptance_of,
    batch_sums,
    read_sums,
    sums_event,
)
from nwor_bench.analysis.parity.tokens import (
    ACCEPTANCE_ONLY,
    EXACT,
    INVALID,
    LOSSY,
    REFERENCE,
    TIES_EVENT,
    CellParity,
    ParityRule,
    acceptance_mismatch,
    check_tokens,
    compare_lengths,
    event_key,
    first_mismatch,
    parity_rule,
    ties_event,
    ties_facts,
)
from nwor_bench.records.cell import INTERLEAVED, Arguments
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.header import ParityFacts
from nwor_bench.records.store import RunData, block_of
from nwor_bench.records.types import BatchRecord, Cell
from nwor_bench.run.gate.ties import TieCheck
from nwor_bench.workload.method_arms import SPECULATION
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import Block

BROKEN_EVENT = "parity_broken"

COMPARED = {
    ParityRule.EXACT: "greedy tokens and per-position acceptance, request by request",
    ParityRule.EXPLAINED: "greedy tokens, request by request: if one differs, mode off's own "
    "log probabilities of both, asked for in three batch shapes, must be a tie, and all ties of a "
    "cell together no farther apart than sound flips; behind a tie the cell goes on from off x "
    "off's token until the gate's block is compared to its end (timed blocks: the first difference "
    "of each request); acceptance within its interval, position by position",
    ParityRule.ACCEPTANCE_ONLY: "output lengths and per-position acceptance: acceptance is "
    "synthetic here, so tokens do not follow the target",
    ParityRule.LOSSY: "K/V and layers, no tokens: FLy is lossy by design",
}


@dataclass(frozen=True)
class BatchAnswer:
    """One batch that has just run: its record and its tokens."""

    record: BatchRecord
    token_ids: tuple[tuple[int, ...], ...]


class ParityGate:
    """Checks batches by the run's parity rule and remembers the cells that broke it.

    Args:
        status: the engine's facts; device, dtype and acceptance method decide the rule.
        encode: prompts to token ids.
        ties: checks differing tokens in precisions below float32.
        ignore_eos: every request generates all its tokens, so lengths may never differ.
        on_event: receives events for the records.
        by_drafts: draft counts are compared, whose steps have other sizes: also float32 has ties.

    Attributes:
        broken: each cell whose output differed, with its first mismatch.
    """

    def __init__(
        self,
        status: EngineStatus,
        encode: Encode,
        ties: TieCheck,
        ignore_eos: bool,
        on_event: Callable[[dict[str, Any]], None],
        by_drafts: bool = False,
    ):
        own = status.device or "cpu", status.dtype or "float32", status.rejection_sample_method
        self.rule = parity_rule(*own, states=bool(status.state_layers))
        self._compared = COMPARED[self.rule]
        if by_drafts and self.rule is ParityRule.ACCEPTANCE_ONLY:
            self._compared = self._compared.replace(" and per-position acceptance", "")
        elif by_drafts and self.rule is not ParityRule.LOSSY:
            self.rule = ParityRule.EXPLAINED
            self._compared = COMPARED[self.rule].rpartition("; ")[0]  # all but acceptance
        self.broken: dict[Cell, str] = {}
        self._encode = encode
        self._ties = ties
        self._ignore_eos = ignore_eos
        self._on_event = on_event
        self._sums = ParitySums()
        self._checked: dict[tuple[Any, ...], dict[str, Any]] = {}

    def restore(self, run: RunData) -> None:
        """Restore the broken cells from a run's records, interrupted blocks included, and the sums
        of its finished blocks: the others run again."""
        for batch in (*run.batches, *run.superseded):
            if batch.parity == INVALID:
                self.broken[batch.cell] = batch.first_mismatch or "its output differs"
        for event in run.events:
            if event.get("event") == BROKEN_EVENT:
                self.broken.setdefault(Cell.from_names(event), event["reason"])
            elif event.get("event") == TIES_EVENT:
                self._checked[event_key(event)] = event
            elif event.get("event") == SUMS_EVENT and block_of(event) in run.finished:
                self._sums.add(Cell.from_names(event), read_sums(event), None)

    def check(
        self, cell: Cell, answer: BatchAnswer, reference: BatchAnswer | None, block: Block
    ) -> BatchAnswer:
        """The answer with the parity of a gate batch; `reference` is None for off x off itself."""
        found = CellParity(REFERENCE)
        if reference is not None:
            found = self._compare(cell, answer, reference, block, to_the_end=True)
        self._remember(cell, found)
        record = replace(answer.record, parity=found.parity, first_mismatch=found.difference)
        return BatchAnswer(record, answer.token_ids)

    def break_cell(self, cell: Cell, reason: str) -> str:
        """Add a reason why a cell is broken; returns all its reasons."""
        reasons = [self.broken[cell], reason] if cell in self.broken else [reason]
        self.broken[cell] = "; ".join(reasons)
        return self.broken[cell]

    def recheck(
        self, block: Block, answers: Mapping[Cell, BatchAnswer], baseline: Cell
    ) -> Iterator[tuple[Cell, str]]:
        """The cells of a timed block that break parity there, with the difference."""
        for cell, answer in answers.items():
            reference = answers.get(cell.stock_twin or baseline, answers[baseline])
            found = self._compare(cell, answer, reference, block, to_the_end=False)
            if self._remember(cell, found):
                yield cell, self.broken[cell]

    def interleaved_difference(
        self, answer: BatchAnswer, reference: BatchAnswer, block: Block
    ) -> str | None:
        """How an interleaved batch's output breaks the rule, in words; None if it does not.

        The first difference of each request is checked: what follows a tie has no cell of its own
        that could go on.
        """
        cell = replace(reference.record.cell, arm=INTERLEAVED)
        found = self._compare(cell, answer, reference, block, to_the_end=False)
        return found.difference if found.parity == INVALID else None

    def break_interleaved(
        self, cells: Iterable[Cell], difference: str
    ) -> Iterator[tuple[Cell, str]]:
        """Break all of these cells that differ from stock vLLM: any of them may be at
        fault. Each with all its reasons."""
        for cell in cells:
            if not cell.is_baseline and (cell.arm is None or cell.drafts is not None):
                yield cell, self.break_cell(cell, f"in interleaved windows: {difference}")

    def facts(self) -> ParityFacts:
        """The rule, the comparison, and the cells that broke it, for run.json."""
        return ParityFacts(
            rule=str(self.rule),
            compared=self._compared,
            ties=ties_facts(self._checked.values()),
            broken={cell.label: reason for cell, reason in self.broken.items()},
        )

    def _remember(self, cell: Cell, found: CellParity) -> bool:
        """True if the cell broke parity."""
        if found.parity == INVALID:
            self.broken[cell] = found.difference or "its output differs"
        return found.parity == INVALID

    def _compare(
        self,
        cell: Cell,
        answer: BatchAnswer,
        reference: BatchAnswer,
        block: Block,
        *,
        to_the_end: bool,
    ) -> CellParity:
        if self.rule is ParityRule.ACCEPTANCE_ONLY or self._ignore_eos:
            lengths = compare_lengths(answer.token_ids, reference.token_ids)
            if lengths:
                return CellParity(INVALID, lengths)
        if self.rule is ParityRule.LOSSY:
            return CellParity(LOSSY)
        if self.rule is ParityRule.EXPLAINED:
            return self._explain(cell, answer, reference, block, to_the_end=to_the_end)
        by_drafts = _other_drafts(cell, reference) or (
            self.rule is ParityRule.ACCEPTANCE_ONLY and isinstance(cell.arm, Arguments)
        )  # another engine draws other numbers
        acceptance = None if by_drafts else acceptance_mismatch(answer.record, reference.record)
        if self.rule is ParityRule.ACCEPTANCE_ONLY:
            return CellParity(INVALID if acceptance else ACCEPTANCE_ONLY, acceptance)
        difference = first_mismatch(answer.token_ids, reference.token_ids) or acceptance
        return CellParity(INVALID if difference else EXACT, difference)

    def _explain(
        self,
        cell: Cell,
        answer: BatchAnswer,
        reference: BatchAnswer,
        block: Block,
        *,
        to_the_end: bool,
    ) -> CellParity:
        """EXPLAINED if differing tokens are ties and acceptance is within its interval."""
        prompts = [tuple(prompt) for prompt in block.token_ids(self._encode)]
        spent_before = self._ties.spent_s
        checked = check_tokens(
            cell, prompts, answer.token_ids, reference.token_ids, self._ties, to_the_end=to_the_end
        )
        scale = self._ties.measured
        if checked.verdicts and scale is not None:
            spent = self._ties.spent_s - spent_before
            event = ties_event(cell, answer.record, checked, scale, spent)
            self._checked[event_key(event)] = event
            self._on_event(event)
        if checked.comparison.parity == INVALID:
            return checked.comparison
        counts = None
        if not _other_drafts(cell, reference):
            both = answer.record, reference.record
            counts = acceptance_of(*both, checked.diverged, checked.tokens)
        batch = batch_sums(prompts, checked, counts)
        self._on_event(sums_event(cell, answer.record, batch))
        outside = self._sums.add(cell, batch, scale)
        return CellParity(INVALID, outside) if outside else checked.comparison


def _other_drafts(cell: Cell, reference: BatchAnswer) -> bool:
    """True if the two draft otherwise, so that they accept other numbers of drafts: other counts,
    or an engine with another speculative_config."""
    drafts = reference.record.cell.drafts
    own_config = isinstance(cell.arm, Arguments) and SPECULATION in cell.arm.text
    return own_config or (drafts is not None and drafts != cell.drafts)


def broken_event(cell: Cell, block: Block, reason: str) -> dict[str, Any]:
    """Event of a cell that broke parity in a timed block; `restore` reads it."""
    return {"event": BROKEN_EVENT, **cell.names, "block": block.number, "reason": reason}
