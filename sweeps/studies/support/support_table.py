"""Write the support table of docs/support.md from what the tests recorded: `make support-table`.

Reads cpu.json and cuda.json beside this file, each written by `pytest --support-json`.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

RESULTS = Path(__file__).resolve().parent
CHECKOUT = RESULTS.parents[2]
BEGIN = "<!-- support table: written by `make support-table` -->"
END = "<!-- end of the support table -->"
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
    """The table in Markdown, with the origin of its columns."""
    rows: list[dict[str, Any]] = []
    rows_of_note: dict[str, dict[str, None]] = {}
    for row in dict.fromkeys(row for facts in outcomes.values() for row in facts["rows"]):
        line: dict[str, Any] = {"Row": row}
        tests_of_row = 0
        for name, title in COLUMNS.items():
            tests = [t for t in outcomes.get(name, {}).get("tests", []) if row in t["rows"]]
            line[title] = cell(tests)
            tests_of_row += len(tests)
            for note in (note for test in tests for note in test["notes"]):
                rows_of_note.setdefault(note, {})[row] = None
        rows.append({**line, "Tests": tests_of_row})
    table = pd.DataFrame(rows).to_markdown(index=False)
    origin = [
        f"{COLUMNS[name]}: {facts['device']}, vLLM {facts['vllm']}, torch {facts['torch']}."
        for name, facts in outcomes.items()
    ]
    lines = origin + [f"{', '.join(named)}: {note}" for note, named in rows_of_note.items()]
    return table + "\n\n" + "\n".join(f"- {line}" for line in lines)


def put(document: str, table: str) -> str:
    """The document with the table between its two comment lines.

    Raises ValueError if the two lines are not there, once each and in order.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"write the two lines into the document, once each: {BEGIN} {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    readme = CHECKOUT / "docs" / "support.md"
    readme.write_text(put(readme.read_text(), render(read_outcomes(RESULTS))))
