"""Acceptance of off and stage compared: length and rates by position, with intervals.

    python sweeps/studies/acceptance/measure.py RUN [--output FOLDER]

RUN is a run folder, or one of which run.json and batches.csv were kept. Figures are vLLM's own
counts of the timed batches, equal to those of cells.csv. Both cells ran the same prompts in each
block. Prints the page and ends with 1 if an interval excludes 0; --output keeps acceptance.csv, a
row a cell and block, and README.md, which `page.py` makes of it.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd
from page import document

from nwor_bench.analysis.comparing.stored_run import BATCHES_TABLE
from nwor_bench.records.csv_tables import read_table
from nwor_bench.records.types import AA, BatchRecord

OFF = "off x off"


def rows_of(folder: Path) -> pd.DataFrame:
    """A row a cell and block: requests' windows, accepted drafts by position, equal texts."""
    header = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    batches = [
        batch
        for batch in read_table(folder / BATCHES_TABLE, BatchRecord)
        if batch.phase == "timed" and batch.arm != AA
    ]
    prompts = {block["block"]: block["prompt_ids"] for block in header["blocks"]}
    texts = {b.block: b.token_digests for b in batches if _cell(b) == OFF}
    rows = []
    for batch in sorted(
        batches, key=lambda batch: (_cell(batch) != OFF, _cell(batch), batch.block)
    ):
        if batch.vllm_num_drafts is None or batch.vllm_accepted_per_position is None:
            raise ValueError(f"batch {batch.batch} has no count of accepted drafts by position")
        equal = zip(batch.token_digests, texts[batch.block], strict=True)
        is_off = _cell(batch) == OFF
        rows.append(
            {"cell": _cell(batch), "block": batch.block, "windows": batch.vllm_num_drafts}
            | {f"accepted_{i}": n for i, n in enumerate(batch.vllm_accepted_per_position, 1)}
            | {"requests": batch.requests, "same_text_as_off": sum(a == b for a, b in equal)}
            | {"prompts": ";".join(prompts[batch.block]) if is_off else ""}
            | {"command": "" if rows else header["command"]}
        )
    return pd.DataFrame(rows)


def _cell(batch: BatchRecord) -> str:
    return f"{batch.nwor_mode} x {batch.scv_mode}"


def main() -> int:
    """Read the run, print the page or keep it; 1 if an interval excludes 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, help="a folder for acceptance.csv and README.md")
    args = parser.parse_args()
    rows = rows_of(args.folder)
    text, found = document(rows)
    if args.output is None:
        print(text)
    else:
        args.output.mkdir(parents=True, exist_ok=True)
        rows.to_csv(args.output / "acceptance.csv", index=False)
        (args.output / "README.md").write_text(text, encoding="utf-8")
    return 0 if all(difference.holds_zero for difference in found) else 1


if __name__ == "__main__":
    sys.exit(main())
