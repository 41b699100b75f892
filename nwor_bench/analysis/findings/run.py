"""Findings: what in a run weakens its numbers, and what to do about it. Pure.

A finding is typed so that a report can group it, a CI job can act on it, and nobody has to read
sentences to know that the GPU throttled. Nothing is dropped because of a finding: outlying
blocks and noisy batches count, and are named here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nwor_bench.analysis.effects import PairEffect
from nwor_bench.analysis.findings.cells import cell_findings
from nwor_bench.analysis.findings.finding import Finding, FindingKind, Severity
from nwor_bench.analysis.findings.interleaved import (
    interleaved_findings,
    with_borne_warnings_as_notes,
)
from nwor_bench.analysis.findings.machine import machine_findings
from nwor_bench.analysis.findings.noise import noise_findings
from nwor_bench.analysis.findings.time_budget import time_budget_findings
from nwor_bench.records.cell import Cell
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.finished_blocks import SUPERSEDED_EVENT, block_name
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult

ON_CPU = "Nothing to do, as times on a CPU say nothing of NWOR on a GPU."

_BLOCKS_HELP = (FindingKind.FEW_BLOCKS, FindingKind.AMBIGUOUS, FindingKind.NOISE_FLOOR)
"""What more blocks would mend, where times count."""


def find_all(
    run: RunData, cells: Sequence[CellResult], effects: Mapping[Cell, PairEffect]
) -> list[Finding]:
    """All findings of a run, the severest first; `effects` are those over off x off."""
    found = [
        *time_budget_findings(run, cells),
        *noise_findings(run, cells),
        *cell_findings(cells),
        *interleaved_findings(effects, cells),
        *machine_findings(run),
        *_records(run),
    ]
    found = with_borne_warnings_as_notes(found, effects, cells)
    if (run.header.engine or EngineStatus()).device == "cpu":
        found = [replace(f, remedy=ON_CPU) if f.kind in _BLOCKS_HELP else f for f in found]
    order = {severity: place for place, severity in enumerate(reversed(Severity))}
    return sorted(found, key=lambda finding: order[finding.severity])


def _records(run: RunData) -> Iterator[Finding]:
    for event in run.events:
        if event.get("event") == "resumed":
            for text in event.get("warnings") or []:
                yield Finding(
                    FindingKind.TORN,
                    Severity.NOTE,
                    f"The run was resumed. {text}",
                    "Nothing to do: what was left out was measured again.",
                )
        if event.get("event") == SUPERSEDED_EVENT:
            count = len(event["batches"])
            yield Finding(
                FindingKind.SUPERSEDED,
                Severity.NOTE,
                f"{block_name((event['phase'], event['block']))} was cut and run again whole: "
                f"{count} {'batch' if count == 1 else 'batches'} of its first try "
                f"{'is' if count == 1 else 'are'} set aside.",
                "Nothing to do: the cells of a block come from one engine process.",
            )
