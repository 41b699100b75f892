"""Is acceptance the same in off and in stage? Length and rates by position, with intervals.

    python tests/benchmarks/acceptance_table.py RUN [--output FILE]

RUN is a run folder, or one of which run.json and batches.csv were kept. Figures are vLLM's own
counts of the timed batches, equal to those of cells.csv. Both cells ran the same prompts in each
block.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from nwor_bench.analysis.comparing.stored_run import BATCHES_TABLE
from nwor_bench.records.csv_tables import read_table
from nwor_bench.records.store import read_header
from nwor_bench.records.types import AA, BatchRecord

Cell = tuple[str, str]
"""NWOR mode and SCV mode."""

OFF: Cell = ("off", "off")
CONFIDENCE = 0.95

TEXT = """# Acceptance in off and in stage

    {command}

Made from that run's batches.csv by `tests/benchmarks/acceptance_table.py`: {blocks} blocks, in each
of which every cell ran the same prompts.

{table}

The interval of a difference is the jackknife's, a whole block left out at a time. Some prompts are
in several blocks ({prompts} different ones in {requests} requests): it may be a little too narrow.
Cells that stage ({cells}) have the same counts in every block.

{equal} of the {requests} requests got the same text in off and stage. The others differ from a
token on that was a tie (the run's parity gate checks that for its own prompts), and behind it text
and windows are others. In float32, where texts are equal, so are all counts: a test holds that on
a CPU (`tests/live_engine/test_engine_eagle.py`).
"""


@dataclass(frozen=True)
class Difference:
    """An estimate for two cells, and the interval of the second less the first."""

    name: str
    off: float
    stage: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether the two may be the same."""
        return self.low <= 0 <= self.high


def main() -> int:
    """Read the run, write the table; 1 if an interval excludes 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, help="a Markdown file (default: the terminal)")
    args = parser.parse_args()
    text, found = document(args.folder)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text, encoding="utf-8")
    return 0 if all(difference.holds_zero for difference in found) else 1


def document(folder: Path) -> tuple[str, list[Difference]]:
    """The Markdown page, and the differences on it."""
    header = read_header(folder)
    batches = timed_batches(read_table(folder / BATCHES_TABLE, BatchRecord))
    counts = {cell: _counts(rows) for cell, rows in batches.items()}
    staging = {cell: values for cell, values in counts.items() if cell[0] == "stage"}
    first = next(iter(staging.values()))
    if not all(np.array_equal(values, first) for values in staging.values()):
        raise ValueError(f"{folder}: cells that stage differ from each other; compare them first")
    found = differences(counts[OFF], first)
    table = pd.DataFrame(
        {
            "off x off": [f"{d.off:.3f}" for d in found],
            "stage": [f"{d.stage:.3f}" for d in found],
            "stage - off [95 % interval]": [
                f"{d.stage - d.off:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for d in found
            ],
            "holds 0": ["yes" if d.holds_zero else "NO" for d in found],
        },
        index=pd.Index([d.name for d in found], name="figure"),
    )
    texts = [_texts(batches[cell]) for cell in (OFF, next(iter(staging)))]
    timed = {batch.block for batch in batches[OFF]}
    prompts = [p for b in header.blocks if b.block in timed for p in b.prompt_ids]
    text = TEXT.format(
        command=header.command,
        blocks=len(first),
        table=table.to_markdown(disable_numparse=True),
        prompts=len(set(prompts)),
        requests=len(prompts),
        cells=", ".join(f"stage x {scv}" for _, scv in staging),
        equal=sum(a == b for a, b in zip(*texts, strict=True)),
    )
    return text, found


def timed_batches(batches: list[BatchRecord]) -> dict[Cell, list[BatchRecord]]:
    """Timed batches in their blocks' order, a cell; without the A/A arm."""
    found: dict[Cell, list[BatchRecord]] = {}
    for batch in sorted(batches, key=lambda batch: batch.block):
        if batch.phase == "timed" and batch.arm != AA:
            found.setdefault((batch.nwor_mode, batch.scv_mode), []).append(batch)
    return found


def _counts(batches: list[BatchRecord]) -> NDArray[np.int64]:
    """[blocks, 1 + k]: requests' windows, then accepted drafts by position."""
    rows = []
    for batch in batches:
        if batch.vllm_num_drafts is None or batch.vllm_accepted_per_position is None:
            raise ValueError(f"batch {batch.batch} has no count of accepted drafts by position")
        rows.append([batch.vllm_num_drafts, *batch.vllm_accepted_per_position])
    return np.array(rows)


def _texts(batches: list[BatchRecord]) -> list[str]:
    """Digests of the requests' tokens."""
    return [digest for batch in batches for digest in batch.token_digests]


def differences(off: NDArray[np.int64], stage: NDArray[np.int64]) -> list[Difference]:
    """Acceptance length and each position's rate of two cells over the same blocks.

    Student's t on the jackknife's pseudo-values, with blocks - 1 degrees of freedom (Miller, The
    jackknife, a review, Biometrika 61, 1974).
    """
    n = len(off)
    names = ["acceptance length", *(f"draft {i} accepted" for i in range(1, off.shape[1]))]
    whole = _estimates(stage.sum(axis=0)) - _estimates(off.sum(axis=0))
    without = np.array(
        [
            _estimates(stage.sum(axis=0) - stage[i]) - _estimates(off.sum(axis=0) - off[i])
            for i in range(n)
        ]
    )
    pseudo = n * whole - (n - 1) * without
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * stats.sem(pseudo, axis=0)
    of_off, of_stage = _estimates(off.sum(axis=0)), _estimates(stage.sum(axis=0))
    return [
        Difference(name, of_off[i], of_stage[i], whole[i] - half[i], whole[i] + half[i])
        for i, name in enumerate(names)
    ]


def _estimates(sums: NDArray[np.int64]) -> NDArray[np.float64]:
    """Acceptance length, and the rate of each position, from windows and accepted drafts."""
    rates = sums[1:] / sums[0]
    return np.array([1 + rates.sum(), *rates])


if __name__ == "__main__":
    sys.exit(main())
