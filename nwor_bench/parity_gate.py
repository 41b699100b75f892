"""The gate of a run: which cells still give the tokens and the acceptance of off x off.

Cells are judged on the gate's block and, at temperature 0, on every timed block once more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nwor_bench.parity import (
    ACCEPTANCE_ONLY,
    EXACT,
    INVALID,
    REFERENCE,
    Comparison,
    GapSource,
    ParityRule,
    acceptance_mismatch,
    compare_lengths,
    digest_mismatch,
    explain_tokens,
    first_mismatch,
    parity_rule,
)
from nwor_bench.plan import Block
from nwor_bench.prompts import Encode
from nwor_bench.records import BatchRecord, Cell, NworMode, ScvMode
from nwor_bench.store import RunData

BROKEN_EVENT = "parity_broken"

COMPARED = {
    ParityRule.EXACT: "greedy tokens and per-position acceptance, request by request",
    ParityRule.EXPLAINED: "greedy tokens, request by request; where one differs, the float32 "
    "logits of both candidates must be closer than the run's precision can tell apart",
    ParityRule.ACCEPTANCE_ONLY: "output lengths and per-position acceptance: vLLM accepts drafts "
    "by the dice here, so tokens do not follow the target",
}


@dataclass(frozen=True)
class Answer:
    """One batch: what was recorded, and the tokens themselves unless it was read back."""

    record: BatchRecord
    token_ids: tuple[tuple[int, ...], ...] | None


class ParityGate:
    """Judges batches by the run's parity rule and remembers the cells that broke it.

    Args:
        status: the engine's; its device, dtype and way to accept drafts decide the rule.
        encode: prompts to token ids.
        gaps: explains differing tokens of precisions below float32; None if nobody can.

    Attributes:
        broken: each cell whose output differed, with what differed first.
    """

    def __init__(self, status: Mapping[str, Any], encode: Encode, gaps: GapSource | None):
        synthetic = status.get("rejection_sample_method") == "synthetic"
        dtype = str(status.get("dtype", "float32"))
        device = str(status.get("device", "cpu"))
        self.rule = parity_rule(device, dtype, synthetic, can_explain=gaps is not None)
        self.broken: dict[Cell, str] = {}
        self._encode = encode
        self._gaps = gaps

    def restore(self, run: RunData) -> None:
        """Take over which cells a run's records say are broken."""
        for batch in run.batches:
            if batch.parity == INVALID:
                self.broken[cell_of(batch)] = batch.first_mismatch or "its output differs"
        for event in run.events:
            if event.get("event") == BROKEN_EVENT:
                modes = NworMode(event["nwor_mode"]), ScvMode(event["scv_mode"])
                cell = Cell(event["pair"], *modes, event.get("arm"))
                self.broken.setdefault(cell, event["reason"])

    def judge(self, cell: Cell, answer: Answer, reference: Answer | None, block: Block) -> Answer:
        """The answer with the parity of a gate batch; `reference` is None for off x off itself."""
        found = Comparison(REFERENCE)
        if reference is not None:
            found = self._compare(answer, reference, block)
        self._remember(cell, found)
        record = replace(answer.record, parity=found.parity, first_mismatch=found.difference)
        return Answer(record, answer.token_ids)

    def break_cell(self, cell: Cell, reason: str) -> str:
        """Remember that a cell is wrong, whatever else was found of it; all its reasons."""
        reasons = [self.broken[cell], reason] if cell in self.broken else [reason]
        self.broken[cell] = "; ".join(reasons)
        return self.broken[cell]

    def recheck(
        self, block: Block, answers: Mapping[Cell, Answer], baseline: Cell
    ) -> Iterator[tuple[Cell, str]]:
        """The cells of a timed block that break parity there, with what differs."""
        for cell, answer in answers.items():
            if self._remember(cell, self._compare(answer, answers[baseline], block)):
                yield cell, self.broken[cell]

    def facts(self) -> dict[str, Any]:
        """The rule, what was compared, and which cells broke it, for run.json."""
        return {
            "rule": str(self.rule),
            "compared": COMPARED[self.rule],
            "broken": {cell.label: reason for cell, reason in self.broken.items()},
        }

    def _remember(self, cell: Cell, found: Comparison) -> bool:
        """True if the cell broke parity."""
        if found.parity == INVALID:
            self.broken[cell] = found.difference or "its output differs"
        return found.parity == INVALID

    def _compare(self, answer: Answer, reference: Answer, block: Block) -> Comparison:
        tokens, expected = answer.token_ids, reference.token_ids
        acceptance = acceptance_mismatch(answer.record, reference.record)
        if self.rule is ParityRule.ACCEPTANCE_ONLY:
            lengths = compare_lengths(tokens, expected) if tokens and expected else None
            difference = lengths or acceptance
            return Comparison(INVALID if difference else ACCEPTANCE_ONLY, difference)
        if self.rule is ParityRule.EXPLAINED and self._gaps is not None and tokens and expected:
            found = explain_tokens(self._encode(block.prompts), tokens, expected, self._gaps)
            if found.difference is not None:
                return found
        difference = _token_mismatch(answer, reference) or acceptance
        return Comparison(INVALID if difference else EXACT, difference)


def broken_event(cell: Cell, block: Block, reason: str) -> dict[str, Any]:
    """A cell that broke parity in a timed block, for the records; `restore` reads it back."""
    return {
        "event": BROKEN_EVENT,
        "pair": cell.pair,
        "nwor_mode": str(cell.nwor_mode),
        "scv_mode": str(cell.scv_mode),
        "arm": cell.arm,
        "block": block.number,
        "reason": reason,
    }


def cell_of(batch: BatchRecord) -> Cell:
    """The cell that a batch belongs to."""
    return Cell(batch.pair, NworMode(batch.nwor_mode), ScvMode(batch.scv_mode), batch.arm)


def _token_mismatch(answer: Answer, reference: Answer) -> str | None:
    if answer.token_ids is None or reference.token_ids is None:
        return digest_mismatch(answer.record.token_digests, reference.record.token_digests)
    return first_mismatch(answer.token_ids, reference.token_ids)
