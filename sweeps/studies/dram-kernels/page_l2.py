"""persisting-l2.md from persisting-l2.csv: python sweeps/studies/dram-kernels/page_l2.py"""

from pathlib import Path

import pandas as pd
from measure_l2 import BUFFER_BYTES
from measured_page import Facts, machine_of, note_of, write_page

TEXT = """# Does L2 keep what was written, while weights stream through it?

    python {command}
    python sweeps/studies/dram-kernels/page_l2.py

{machine}.

{note}A round writes {buffer} MB (the copies of 8 requests x 4 drafts in 28 layers), streams memory
through L2, and reads the buffer again. MB of a round that reached DRAM, written / read, beside the
stream alone. What L2 keeps costs neither: 0.00 / 0.00 is what `--stage-l2 persist` hopes for. A
way is measured once, over 12 to 200 rounds.

{table}

- `normal`: nothing is asked for. `window`: an access-policy window with hit ratio 1 on the stream;
  `captured window`: in a CUDA graph captured on it; `node window`: set on each kernel node of a
  graph. `evict_last`: the kernels' own accesses say so (`createpolicy.fractional.L2::evict_last`).
- `n x`: n times the buffer of L2 set aside, {given} MB as CUDA gave it; {refusals}. `1 x`
  is what `--stage-l2 persist` asks for.

**L2 keeps them for a while, and not for long enough.** After {kept_at}, {once} % of the
buffer is still there with 1 x, {most} % at most (2 x, and `evict_last` with nothing set aside).
After {gone_at}, at most {gone_most} %. The graphs' nodes do hold the window
(read back: {nodes}). In an engine a window of
8 x 4 streams 11.7 GB past the first layer's copies, half of that past the average ones; there
`--stage-l2 persist` saved nothing ([DRAM bytes](../dram-bytes/README.md)). All H200s were in
virtual machines; whether one without, or another GPU, keeps them, `measure_l2.py` tells.
"""


def text_of(rows: pd.DataFrame, facts: Facts) -> str:
    """The whole page."""
    asked = rows[~rows["way"].isin(["weights"]) & ~rows["way"].str.startswith("normal")]
    given = sorted(rows.loc[rows["set_aside_mb"] > 0, "set_aside_mb"].unique())
    kept = 100 * (1 - asked["written_mb"] * 1e6 / BUFFER_BYTES)
    streamed = sorted(set(zip(rows["streamed_read_mb"], rows["streamed_written_mb"], strict=True)))
    longer = asked["streamed_read_mb"] > streamed[0][0]
    once = asked["way"].str.startswith("1 x")
    return TEXT.format(
        command=facts["command"],
        machine=machine_of(facts, ("torch", "triton")),
        note=note_of(facts),
        buffer=f"{BUFFER_BYTES / 1e6:.2f}",
        table=_table(rows),
        given=", ".join(f"{amount:.1f}" for amount in given),
        refusals="nothing was refused" if rows["refused"].isna().all() else "some were refused",
        kept_at=_streamed(*streamed[0]),
        once=f"{kept[once & ~longer].mean():.0f}",
        most=f"{kept[~longer].max():.0f}",
        gone_at=_streamed(*streamed[1]),
        gone_most=f"{max(0.0, kept[longer].max()):.1f}",
        nodes=captured_windows(facts["nodes"]),
    )


def _streamed(read: float, written: float) -> str:
    """`0.6 GB read and 0.4 written`."""
    more = f" and {written / 1e3:.1f} written" if written else ""
    return f"{read / 1e3:.1f} GB read{more}"


def _table(rows: pd.DataFrame) -> str:
    lines: dict[str, dict[str, str]] = {}
    for row in rows[rows["way"] != "weights"].to_dict("records"):
        line = lines.setdefault(row["way"], {"way": row["way"].replace(" x set aside", " x")})
        moved = f"{row['written_mb']:.2f} / {row['read_mb']:.2f}"
        line[_streamed(row["streamed_read_mb"], row["streamed_written_mb"])] = moved
    return str(pd.DataFrame(lines.values()).to_markdown(index=False, disable_numparse=True))


def captured_windows(nodes: list[str]) -> str:
    """What the nodes of graphs hold that were captured on a covered stream."""
    start = "captured window: "
    found = [line.removeprefix(start) for line in nodes if line.startswith(start)]
    return "; ".join(dict.fromkeys(line.partition(": ")[2] for line in found))


if __name__ == "__main__":
    here = Path(__file__).parent
    write_page(here / "persisting-l2.csv", here / "persisting-l2.md", text_of)
