"""l2-persistence.md from what `l2_persistence.py` measured.

python tests/benchmarks/l2_table.py DIR --output sweeps/results/h200
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
from l2_persistence import BUFFER_BYTES
from run_machine import keep_measured, machine_of

TEXT = """# Does L2 keep what was written, while weights stream through it?

    python {command}
    python tests/benchmarks/l2_table.py {folder} --output sweeps/results/h200

{machine}.

A round writes {buffer} MB (the copies of 8 requests x 4 drafts in 28 layers), streams weights, and
reads the buffer again. MB of a round that reached DRAM, written / read, beside the weights alone.
What L2 keeps costs neither: 0.00 / 0.00 is what `--stage-l2 persist` hopes for. A layer's weights
are 201 MB, a window's 5,637.

{table}

- `normal`: nothing is asked for. `window`: an access-policy window with hit ratio 1 on the stream;
  `captured window`: in a CUDA graph captured on it; `node window`: set on each kernel node of a
  graph. `evict_last`: the kernels' own accesses say so (`createpolicy.fractional.L2::evict_last`).
- `n x`: so much L2 set aside, as CUDA then gave it ({given} MB); {refusals}.

**It keeps them for a while, however it is asked, and not for long enough.** With {kept_at} MB
streamed in between, {kept_least} to {kept_most} % of the buffer is still there; with {gone_at} MB,
two layers' weights, at most {gone_most} %. Setting more L2 aside does not help, nor does it matter
who asks. The graphs' nodes do hold the window (read back: {nodes}).
A window's copies would have to stay while {window_streamed} MB of weights pass, and the contexts
besides, so `--stage-l2 persist` cannot save what it was meant to save there. H200s in virtual
machines were all we had; whether one without, or another GPU, keeps them, this script tells.
"""


def text_of(rows: pd.DataFrame, facts: dict[str, Any], folder: Path) -> str:
    """The whole page."""
    asked = rows[~rows["way"].isin(["weights"]) & ~rows["way"].str.startswith("normal")]
    streamed = sorted(rows["streamed_mb"].unique())
    given = sorted(rows.loc[rows["set_aside_mb"] > 0, "set_aside_mb"].unique())
    shares = {
        amount: 100 * (1 - group["written_mb"] * 1e6 / BUFFER_BYTES)
        for amount, group in asked.groupby("streamed_mb")
    }
    least, next_one = streamed[:2]
    return TEXT.format(
        command=facts["command"],
        folder=folder,
        machine=machine_of(facts, ("torch", "triton")),
        buffer=f"{BUFFER_BYTES / 1e6:.2f}",
        table=_table(rows),
        given=", ".join(f"{amount:.1f}" for amount in given),
        refusals="nothing was refused" if rows["refused"].isna().all() else "some were refused",
        kept_at=f"{least:,.0f}",
        kept_least=f"{shares[least].min():.0f}",
        kept_most=f"{shares[least].max():.0f}",
        gone_at=f"{next_one:,.0f}",
        gone_most=f"{max(0.0, max(shares[amount].max() for amount in streamed[1:])):.1f}",
        nodes=captured_windows(facts["nodes"]),
        window_streamed=f"{streamed[-1]:,.0f}",
    )


def _table(rows: pd.DataFrame) -> str:
    lines: dict[str, dict[str, str]] = {}
    for row in rows[rows["way"] != "weights"].to_dict("records"):
        line = lines.setdefault(row["way"], {"way": row["way"].replace(" x set aside", " x")})
        moved = f"{row['written_mb']:.2f} / {row['read_mb']:.2f}"
        line[f"{row['streamed_mb']:,.0f} MB streamed"] = moved
    return str(pd.DataFrame(lines.values()).to_markdown(index=False, disable_numparse=True))


def captured_windows(nodes: list[str]) -> str:
    """What the nodes of graphs hold that were captured on a covered stream."""
    start = "captured window: "
    found = [line.removeprefix(start) for line in nodes if line.startswith(start)]
    return "; ".join(dict.fromkeys(line.partition(": ")[2] for line in found))


def main() -> None:
    """Parse, write, keep what was measured beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    keep_measured(arguments.folder, arguments.output, "l2-persistence")
    facts = json.loads((arguments.output / "l2-persistence.json").read_text(encoding="utf-8"))
    rows = pd.read_csv(arguments.output / "l2-persistence.csv")
    text = text_of(rows, facts, arguments.folder)
    (arguments.output / "l2-persistence.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
