"""README.md from acceptance.csv: python sweeps/studies/acceptance/page.py"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

OFF = "off x off"
CONFIDENCE = 0.95

TEXT = """# Acceptance in off and in stage

{answer}

    {command}

Made from that run's batches.csv by `sweeps/studies/acceptance/measure.py`: {blocks} blocks, in each
of which every cell ran the same prompts. The counts of every block are in
[acceptance.csv](acceptance.csv).

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
        """True if the interval contains 0."""
        return self.low <= 0 <= self.high


def document(rows: pd.DataFrame) -> tuple[str, list[Difference]]:
    """The Markdown page, and the differences on it."""
    counts = {str(cell): counts_of(part) for cell, part in rows.groupby("cell", sort=False)}
    staging = {cell: values for cell, values in counts.items() if cell.startswith("stage")}
    first = next(iter(staging))
    if not all(np.array_equal(values, staging[first]) for values in staging.values()):
        raise ValueError("cells that stage differ from each other; compare them first")
    found = differences(counts[OFF], staging[first])
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
    off, stage = (rows[rows["cell"] == cell] for cell in (OFF, first))
    prompts = [prompt for block in off["prompts"] for prompt in str(block).split(";")]
    text = TEXT.format(
        answer=_answer(found),
        command=off.iloc[0]["command"],
        blocks=len(off),
        table=table.to_markdown(disable_numparse=True),
        prompts=len(set(prompts)),
        requests=int(stage["requests"].sum()),
        cells=", ".join(staging),
        equal=int(stage["same_text_as_off"].sum()),
    )
    return text, found


def _answer(found: list[Difference]) -> str:
    length = found[0]
    held = sum(d.holds_zero for d in found)
    return (
        f"Drafts gain {length.off:.2f} tokens a window in off and {length.stage:.2f} in stage; the "
        f"interval of the difference\nholds 0 in {held} of {len(found)} figures (length and each "
        "position)."
    )


def counts_of(rows: pd.DataFrame) -> NDArray[np.int64]:
    """[blocks, 1 + k] of one cell: requests' windows, then accepted drafts by position."""
    accepted = [name for name in rows.columns if name.startswith("accepted_")]
    return rows.sort_values("block")[["windows", *accepted]].to_numpy(dtype=np.int64)


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
    table = Path(__file__).with_name("acceptance.csv")
    text, _ = document(pd.read_csv(table))
    table.with_name("README.md").write_text(text, encoding="utf-8")
