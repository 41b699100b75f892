"""Write the support table of docs/support.md from what the tests recorded: `make support-table`.

Reads cpu.json and cuda.json beside this file, each written by `pytest --support-json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tables import markdown, with_tables

RESULTS = Path(__file__).resolve().parent
PAGE = RESULTS.parents[2] / "docs" / "support.md"
COLUMNS = {"cpu": "CPU (V1 runner)", "cuda": "GPU (V2 runner)"}


def read_outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """By column ("cpu", "cuda") what was recorded there; a column without a file is left out."""
    files = {name: folder / f"{name}.json" for name in COLUMNS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def cell(tests: list[dict[str, Any]]) -> str:
    """Outcome of one row's tests: holds, written directly with the reason, or failed."""
    if not tests:
        return ""
    failed = [test for test in tests if test["outcome"] != "passed"]
    if failed:
        return f"FAILED ({len(failed)} of {len(tests)})"
    direct = [test for test in tests if test["written_directly"]]
    reasons = sorted({reason for test in direct for reason in test["written_directly"]})
    because = ", ".join(f"`{reason}`" for reason in reasons)
    if not direct:
        return "staged"
    return f"written directly: {because}" if len(direct) == len(tests) else f"staged; {because}"


def render(outcomes: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown, with the origin of its columns. Rows with equal outcomes share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    rows_of_note: dict[str, dict[str, None]] = {}
    for row in dict.fromkeys(row for facts in outcomes.values() for row in facts["rows"]):
        tests = {
            name: [t for t in outcomes.get(name, {}).get("tests", []) if row in t["rows"]]
            for name in COLUMNS
        }
        rows.setdefault(tuple(cell(each) for each in tests.values()), []).append(row)
        for note in (n for each in tests.values() for test in each for n in test["notes"]):
            rows_of_note.setdefault(note, {})[row] = None
    lines = [("; ".join(names), *cells) for cells, names in rows.items()]
    table = markdown(["Tested", *COLUMNS.values()], lines)
    origin = [
        f"{COLUMNS[name]}: {len(facts['tests'])} tests, {facts['device']}, vLLM {facts['vllm']}, "
        f"torch {facts['torch']}."
        for name, facts in outcomes.items()
    ]
    notes = origin + [f"{', '.join(named)}: {note}" for note, named in rows_of_note.items()]
    return table + "\n\n" + "\n".join(f"- {note}" for note in notes)


if __name__ == "__main__":
    table = render(read_outcomes(RESULTS))
    PAGE.write_text(with_tables(PAGE.read_text(), {"support": table}))
