"""Acceptance of off and stage compared: length and rates by position, with intervals.

    python sweeps/studies/acceptance/measure.py RUN [--output FOLDER]

RUN is a run folder, or one of which run.json and batches.csv were kept. Figures are vLLM's own
counts of the timed batches, equal to those of cells.csv. Both cells ran the same prompts in each
block. Writes acceptance.csv, a row a cell and block, and differences.csv, a row a figure; ends with
1 if an interval excludes 0.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from nwor_bench.records.types import AA

OFF = "off x off"
CONFIDENCE = 0.95


def rows_of(folder: Path) -> pd.DataFrame:
    """A row a cell and block: requests' windows, accepted drafts by position, equal texts."""
    header = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    table = pd.read_csv(folder / "batches.csv", keep_default_na=False)
    table = table[table["phase"] == "timed"]
    if "arm" in table:
        table = table[table["arm"] != AA]
    table = table.assign(cell=table["nwor_mode"] + " x " + table["scv_mode"])
    table = table.assign(other=table["cell"] != OFF).sort_values(["other", "cell", "block"])
    prompts = {block["block"]: block["prompt_ids"] for block in header["blocks"]}
    texts = table[~table["other"]].set_index("block")["token_digests"].to_dict()
    rows = []
    for batch in table.to_dict("records"):
        if batch["vllm_num_drafts"] == "" or batch["vllm_accepted_per_position"] == "":
            raise ValueError(f"batch {batch['batch']} has no count of accepted drafts by position")
        accepted = map(int, batch["vllm_accepted_per_position"].split(";"))
        own, off = (text.split(";") for text in (batch["token_digests"], texts[batch["block"]]))
        equal = sum(a == b for a, b in zip(own, off, strict=True))
        rows.append(
            {"cell": batch["cell"], "block": batch["block"], "windows": batch["vllm_num_drafts"]}
            | {f"accepted_{i}": n for i, n in enumerate(accepted, 1)}
            | {"requests": batch["requests"], "same_text_as_off": equal}
            | {"prompts": "" if batch["other"] else ";".join(prompts[batch["block"]])}
            | {"command": "" if rows else header["command"]}
        )
    return pd.DataFrame(rows)


def differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Acceptance length and each position's rate in off and in stage, with their difference.

    Student's t on the jackknife's pseudo-values, with blocks - 1 degrees of freedom (Miller, The
    jackknife, a review, Biometrika 61, 1974).

    Raises:
        ValueError: cells that stage differ from each other.
    """
    cells = {str(cell): counts_of(part) for cell, part in rows.groupby("cell", sort=False)}
    off = cells[OFF]
    stage, *others = (counts for cell, counts in cells.items() if cell.startswith("stage"))
    if not all(np.array_equal(stage, other) for other in others):
        raise ValueError("cells that stage differ from each other; compare them first")
    n = len(off)
    of_off, of_stage = (_estimates(counts.sum(axis=0)) for counts in (off, stage))
    without = np.array(
        [
            _estimates(stage.sum(axis=0) - stage[i]) - _estimates(off.sum(axis=0) - off[i])
            for i in range(n)
        ]
    )
    whole = of_stage - of_off
    pseudo = n * whole - (n - 1) * without
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * stats.sem(pseudo, axis=0)
    names = ["acceptance length", *(f"draft {i} accepted" for i in range(1, off.shape[1]))]
    return pd.DataFrame(
        {"figure": names, "off": of_off, "stage": of_stage}
        | {"low": whole - half, "high": whole + half}
    )


def counts_of(rows: pd.DataFrame) -> NDArray[np.int64]:
    """[blocks, 1 + k] of one cell: requests' windows, then accepted drafts by position."""
    accepted = [name for name in rows.columns if name.startswith("accepted_")]
    return rows.sort_values("block")[["windows", *accepted]].to_numpy(dtype=np.int64)


def _estimates(sums: NDArray[np.int64]) -> NDArray[np.float64]:
    """Acceptance length, and the rate of each position, from windows and accepted drafts."""
    rates = sums[1:] / sums[0]
    return np.array([1 + rates.sum(), *rates])


def main() -> int:
    """Read the run and write both tables; 1 if an interval excludes 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    rows = rows_of(args.folder)
    found = differences(rows)
    args.output.mkdir(parents=True, exist_ok=True)
    rows.to_csv(args.output / "acceptance.csv", index=False)
    found.to_csv(args.output / "differences.csv", index=False, float_format="%.6g")
    return int(not ((found.low <= 0) & (found.high >= 0)).all())


if __name__ == "__main__":
    sys.exit(main())
