"""sweep.json, the index of a sweep folder, and the summary of its runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from nwor_bench.aggregate import summarise
from nwor_bench.errors import StoreError
from nwor_bench.report.text import ratio
from nwor_bench.store import read_run, write_atomically
from nwor_bench.sweep_file import EngineGroup, SweepFile

INDEX_FILE = "sweep.json"
SWEEP_FORMAT_VERSION = 1
PENDING, DONE, FAILED, INTERRUPTED = "pending", "done", "failed", "interrupted"

_SHOWN = (
    "nwor_mode", "scv_mode", "arm", "verdict", "ratio_to_off", "ratio_ci_low", "ratio_ci_high",
    "compared", "smallest_effect", "window_ms_mean", "latency_ms_p50", "tokens_per_s",
    "acceptance_rate", "batches", "parity",
)  # fmt: skip


class SweepIndex:
    """What a sweep folder holds, rewritten after every run so that it is true at any moment."""

    def __init__(self, folder: Path, content: dict[str, Any]):
        """Use `create` or `open` instead."""
        self.folder = folder
        self.content = content

    @classmethod
    def create(
        cls, folder: Path, sweep: SweepFile, groups: Sequence[EngineGroup], started_at: str
    ) -> "SweepIndex":
        """Begin a sweep folder, with every run pending."""
        runs = [
            {"number": point.number, "folder": point.folder, "engine": group.number, **point.axes,
             "status": PENDING, "exit_code": None, "error": None}
            for group in groups
            for point in group.points
        ]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        index = cls(
            folder,
            {
                "format_version": SWEEP_FORMAT_VERSION,
                "name": sweep.name,
                "sweep": sweep.model_dump(mode="json"),
                "engines": len(groups),
                "started_at": started_at,
                "finished_at": None,
                "runs": sorted(runs, key=lambda run: run["number"]),
            },
        )
        index.write()
        return index

    @classmethod
    def open(cls, folder: Path) -> "SweepIndex":
        """Read a sweep folder. Raises StoreError if its index is damaged or of another version."""
        path = folder / INDEX_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != SWEEP_FORMAT_VERSION:
            raise StoreError(
                f"{path}: format_version {version!r} is unknown; this nwor-bench reads "
                f"{SWEEP_FORMAT_VERSION}"
            )
        return cls(folder, content)

    @property
    def sweep(self) -> SweepFile:
        """What the sweep was begun with. Raises StoreError if that is damaged."""
        try:
            return SweepFile.model_validate_json(json.dumps(self.content["sweep"]))
        except (KeyError, ValidationError) as error:
            raise StoreError(f"{self.folder / INDEX_FILE}: sweep: {error}") from error

    def status(self, number: int) -> str:
        """How far the run of that number is."""
        return str(self._run(number)["status"])

    def set_run(self, number: int, **changes: Any) -> None:
        """Note what became of a run."""
        self._run(number).update(changes)
        self.write()

    def write(self) -> None:
        """Rewrite sweep.json atomically."""
        write_atomically(self.folder / INDEX_FILE, json.dumps(self.content, indent=2) + "\n")

    def _run(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = next(r for r in self.content["runs"] if r["number"] == number)
        return found


def write_summary(index: SweepIndex) -> None:
    """summary.csv (one row a run and cell) and summary.md, from the runs' records."""
    rows, lines = [], []
    for run in index.content["runs"]:
        place = {name: run.get(name) for name in
                 ("number", "pair", "scenario", "draft_tokens", "requests", "temperature",
                  "dtype", "cache_dtype", "acceptance_length", "status")}  # fmt: skip
        folder = index.folder / run["folder"]
        cells = summarise(read_run(folder)) if (folder / "run.json").is_file() else []
        for cell in cells:
            shown = {name: getattr(cell, name) for name in _SHOWN}
            rows.append({**place, **shown, "folder": run["folder"]})
            lines.append({**place, "cell": cell.label, "verdict": cell.verdict,
                          "time over off x off": ratio(cell)})  # fmt: skip
        if not cells:
            rows.append({**place, "folder": run["folder"]})
            lines.append({**place, "cell": "", "verdict": run["error"] or "",
                          "time over off x off": ""})  # fmt: skip
    frame = pd.DataFrame(rows, dtype=object)
    write_atomically(index.folder / "summary.csv", frame.to_csv(index=False, lineterminator="\n"))
    # An axis that the file leaves to its defaults tells a reader nothing.
    table = pd.DataFrame(lines, dtype=object).dropna(axis="columns", how="all")
    table = table.fillna("").astype(str)
    text = table.to_markdown(index=False, tablefmt="pipe", disable_numparse=True)
    title = f"# nwor-bench sweep: {index.content['name']}\n\n"
    write_atomically(index.folder / "summary.md", f"{title}{text}\n")
