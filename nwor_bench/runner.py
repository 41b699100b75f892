"""Run a plan: warm-up, gate, timed blocks; every batch is stored as it ends."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from nwor_bench.config import SweepSpec
from nwor_bench.engine import Engine, Sampling
from nwor_bench.measure import BatchPlace, batch_record, window_records
from nwor_bench.parity import EXACT, INVALID, REFERENCE, acceptance_mismatch, first_mismatch
from nwor_bench.plan import Block, Plan
from nwor_bench.progress import Progress
from nwor_bench.prompts import Prompt
from nwor_bench.records import BatchRecord, Cell
from nwor_bench.store import RunStore

Encode = Callable[[tuple[Prompt, ...]], list[list[int]]]
"""Prompts to token ids, with the target's tokenizer."""


@dataclass(frozen=True)
class Answer:
    """One batch: what was recorded, and the tokens themselves for the gate."""

    record: BatchRecord
    token_ids: tuple[tuple[int, ...], ...]


class Sweep:
    """One pair's sweep on one engine.

    Args:
        plan: what to run.
        spec: how to sample.
        engine: started, in any mode.
        store: receives every batch as it ends.
        encode: prompts to token ids.
        progress: is told what happens.
    """

    def __init__(
        self,
        plan: Plan,
        spec: SweepSpec,
        engine: Engine,
        store: RunStore,
        encode: Encode,
        progress: Progress,
    ):
        self.plan = plan
        self.spec = spec
        self.broken: dict[Cell, str] = {}
        self._engine = engine
        self._store = store
        self._encode = encode
        self._progress = progress
        self._num_batches = 0
        self._bytes_per_token = engine.status()["bytes_per_token"]

    def run(self) -> None:
        """Warm up, gate, then time; cells that break parity are not run further."""
        for _ in range(self.plan.warmup):
            self._run_batch(self.plan.baseline, "warmup", self.plan.gate, order=0)
        self.gate()
        for block in self.plan.blocks:
            self._timed_block(block)

    def gate(self) -> None:
        """Greedy tokens and per-position acceptance of every cell against off x off."""
        reference: Answer | None = None
        for order, cell in enumerate(self.plan.gate.order):
            answer = self._run_batch(cell, "gate", self.plan.gate, order, reference)
            reference = reference or answer
        for cell, reason in self.broken.items():
            self._progress.say(f"gate: {cell.label} is INVALID: {reason}")
        passed = len(self.plan.cells) - len(self.broken)
        self._progress.say(
            f"gate: {passed} of {len(self.plan.cells)} cells give the tokens and the acceptance "
            "of off x off"
        )

    def _timed_block(self, block: Block) -> None:
        answers: dict[Cell, Answer] = {}
        for order, cell in enumerate(block.order):
            if cell not in self.broken:
                answers[cell] = self._run_batch(cell, "timed", block, order)
        if self.spec.scenario.temperature == 0:
            self._recheck(block, answers)

    def _recheck(self, block: Block, answers: dict[Cell, Answer]) -> None:
        """A timed block at temperature 0 is one more gate, at no cost."""
        reference = answers[self.plan.baseline]
        for cell, answer in answers.items():
            mismatch = _mismatch(answer, reference)
            if mismatch is not None:
                self.broken[cell] = mismatch
                self._store.append_event(
                    {
                        "event": "parity_broken",
                        "pair": cell.pair,
                        "nwor_mode": str(cell.nwor_mode),
                        "scv_mode": str(cell.scv_mode),
                        "block": block.number,
                        "reason": mismatch,
                    }
                )
                self._progress.say(f"block {block.number}: {cell.label} is INVALID: {mismatch}")

    def _run_batch(
        self, cell: Cell, phase: str, block: Block, order: int, reference: Answer | None = None
    ) -> Answer:
        prompts = self._encode(block.prompts)
        sampling = self._sampling(phase, block)
        place = BatchPlace(cell, phase, block, self._num_batches, order, _now())
        self._engine.set_modes(cell)
        output = self._engine.generate(prompts, sampling)
        self._num_batches += 1
        answer = Answer(batch_record(place, output, prompts, sampling), output.token_ids)
        if phase == "gate":
            answer = self._judge(cell, answer, reference)
        self._store.append_batch(
            answer.record, window_records(place, output, self._bytes_per_token)
        )
        self._progress.batch_done(cell, answer.record)
        return answer

    def _judge(self, cell: Cell, answer: Answer, reference: Answer | None) -> Answer:
        """Set the parity of a gate batch, and remember a cell that broke it."""
        mismatch = None if reference is None else _mismatch(answer, reference)
        if mismatch is not None:
            self.broken[cell] = mismatch
        parity = REFERENCE if reference is None else INVALID if mismatch else EXACT
        record = replace(answer.record, parity=parity, first_mismatch=mismatch)
        return Answer(record, answer.token_ids)

    def _sampling(self, phase: str, block: Block) -> Sampling:
        """The gate is greedy whatever the scenario's temperature; seeds depend on the block."""
        scenario = self.spec.scenario
        greedy = phase == "gate"
        return Sampling(
            max_new_tokens=scenario.max_new_tokens,
            temperature=0.0 if greedy else scenario.temperature,
            top_p=1.0 if greedy else scenario.top_p,
            seed=self.spec.seed + block.number * scenario.requests,
            ignore_eos=scenario.ignore_eos,
        )


def _mismatch(answer: Answer, reference: Answer) -> str | None:
    return first_mismatch(answer.token_ids, reference.token_ids) or acceptance_mismatch(
        answer.record, reference.record
    )


def blocks_for_header(plan: Plan) -> list[dict[str, Any]]:
    """Each block's number, cell order and prompts, for run.json."""
    return [
        {
            "block": block.number,
            "order": [cell.label for cell in block.order],
            "prompt_ids": [prompt.id for prompt in block.prompts],
        }
        for block in (plan.gate, *plan.blocks)
    ]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
