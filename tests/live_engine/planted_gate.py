"""The sweep's gate on an engine that is running already, and which of its checks saw something."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.analysis.invariants import find_violations
from nwor_bench.analysis.parity.tokens import ParityRule
from nwor_bench.engine.protocol import Engine
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunStore, read_run
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.blocks import BlockRunner
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import GATE_BLOCK, Block, Plan

CELLS = ("off x off", "stage x off", "stage x graph")
"""The cells of each gate: the reference, and staging with and without SCV."""

CHECKS = ("tokens", "acceptance", "K/V", "layers", "writes", "counters", "ranks")
"""What can see a fault: the gate's five comparisons, and the counts of `invariants`."""


class Quiet:
    """A sweep's progress that says nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def batch_done(self, cell: Cell, record: Any) -> None:
        """Nothing."""

    def step(self, now: str, then: str) -> None:
        """Nothing."""

    def leading(self, ratio: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class GateOutcome:
    """What one gate found.

    Attributes:
        caught: by cell ("stage x graph"), the checks that saw a fault; cells without one are
            left out.
        reasons: by cell, the first words of each check.
        staged: staged tokens of all windows: a gate in which nothing was staged checks nothing.
    """

    caught: dict[str, frozenset[str]]
    reasons: dict[str, list[str]]
    staged: int

    @property
    def checks(self) -> frozenset[str]:
        """The checks that saw a fault in any cell."""
        return frozenset().union(*self.caught.values())


def run_gate(
    engine: Engine,
    spec: RunSpec,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    pair: str = "tiny",
    *,
    interleaved: bool = False,
    rule: ParityRule | None = None,
    **sweep: Any,
) -> GateOutcome:
    """Run `BlockRunner.gate` on these prompts (token ids) with a store in `folder`.

    Args:
        interleaved: the gate of a run whose cells are interleaved.
        rule: a GPU's rule on a CPU: by this one, and with the K/V gate's tolerances.
        sweep: further keyword arguments of `BlockRunner`.
    """
    cells = tuple(_cell(pair, label) for label in CELLS)
    named = tuple(Prompt(f"prompt {n}", "planted", "") for n in range(len(prompts)))
    plan = Plan(cells, 0, 0, Block(GATE_BLOCK, cells, named), (), interleaved)
    store = RunStore.create(folder, RunHeader(engine=engine.status()))
    gate = BlockRunner(
        plan, spec, engine, store, lambda _: [list(p) for p in prompts], Quiet(), **sweep
    )  # fmt: skip
    if rule is not None:
        gate.parity.rule, gate.kv_gate._one_attention = rule, False
    gate.gate()
    store.update(parity=gate.parity.facts())
    return _outcome(gate, read_run(folder))


def _cell(pair: str, label: str) -> Cell:
    nwor, scv = label.split(" x ")
    return Cell(pair, NworMode(nwor), ScvMode(scv))


def _outcome(gate: BlockRunner, run: Any) -> GateOutcome:
    reasons: dict[str, list[tuple[str, str]]] = {}
    for cell, reason in gate.parity.broken.items():
        reasons.setdefault(cell.label, []).extend(_told_apart(reason))
    for violation in find_violations(run):
        reasons.setdefault(violation.cell.label, []).append(
            (_count_check(violation.text), violation.text)
        )
    return GateOutcome(
        caught={cell: frozenset(check for check, _ in found) for cell, found in reasons.items()},
        reasons={cell: [text for _, text in found] for cell, found in reasons.items()},
        staged=sum(window.staged_tokens for window in run.windows),
    )


def _told_apart(reason: str) -> Iterable[tuple[str, str]]:
    """The check that each part of a gate's reason comes from."""
    found = []
    of_tokens = ("requests differ", "requests answered", "output lengths", "differing tokens")
    if any(words in reason for words in of_tokens):
        found.append(("tokens", reason))
    if "accepted per position" in reason or "acceptance" in reason:
        found.append(("acceptance", reason))
    if "K/V:" in reason:
        found.append(("K/V", reason))
    if "local gate:" in reason:
        found.append(("layers", reason))
    if "writes:" in reason:
        found.append(("writes", reason))
    if not found:
        raise AssertionError(f"a reason of no known check: {reason}")
    return found


def _count_check(text: str) -> str:
    """Counts of windows, of ranks, or once more the tokens that differ."""
    if " on rank " in text:
        return "ranks"
    return "tokens" if "gave other tokens" in text else "counters"
