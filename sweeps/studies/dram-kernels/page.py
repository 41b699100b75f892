"""README.md from attention.csv: python sweeps/studies/dram-kernels/page.py"""

from pathlib import Path
from typing import Any

import pandas as pd
from measure import SHAPE, WAYS
from measured_page import Facts, machine_of, note_of, write_page

STOCK, OURS, COPIED = "write, attend, read", "nwor, read", "first, copy, nwor, read"
"""Ways through a whole layer: stock vLLM, staged by reference, staged by copy."""

CASE = ["requests", "drafts"]

PROGRAMS = {STOCK: 132, OURS: 264}
"""Programs of each attention kernel on an H200 at once: one and two a multiprocessor."""

TEXT = """# The cache write and the attention of a window, by themselves

At 8 x 4 stock's attention leaves {split_mb} MB of partial results a window in DRAM, ours none. At
64 x 8 neither has any, and ours leaves {spilled_mb} MB of spilled registers.

    python {command}
    python sweeps/studies/dram-kernels/page.py

{machine}.
Llama-3.2-3B's shape: 28 layers, 24 query and 8 K/V heads of 128, bf16; {context} tokens in the
cache of each request (of the smallest case, 16).

{note}MB of a window (28 layers), above what writing the QKV outputs and reading the weights moves.
Medians of {rounds} rounds, in which the ways take turns; no round lies further from its way's
median than {apart} MB, but for {outliers}.

{table}

{ways}

## What it says

- **FlashAttention 3 cuts contexts in two at 8 x 4 and not at all at 64 x 8.** Its own schedule
  says so ({splits}),
  and the bytes bear it out: splits leave {split_mb} MB at 8 x 4 ({split_model} by arithmetic) and
  {no_split_mb} at 64 x 8.
- **Ours leaves its output and nothing else at 8 x 4**: {ours_mb} MB, of which the output has
  {output_mb}. Its partial results do not reach DRAM. At 64 x 8 it leaves {spilled_mb} MB more
  than the output's {big_output_mb}: spilled registers.
- **Writing K/V to the cache reads nothing** but some {write_code} KB a layer: no line of the
  cache is read first.
- **Every launch reads something whatever its data**, its own code, we take it: between two layers
  the weights push that out of L2. With next to no data (1 x 1, 16 tokens, whose K/V are taken off)
  stock reads {stock_code} KB a layer in two launches and a merge, ours {our_code}, staged by copy
  {copy_code}. That is the difference at 8 x 4, too: ours {small_gap} MB a window, by copy
  {small_copy_gap}.
- **At 64 x 8 both read again what was written just before.** A layer's cached K/V ({cached} MB) are
  several times L2, and 512 K/V heads of requests run on {stock_programs} programs at once in
  FlashAttention, on {our_programs} in ours. All but the first find their queries and the window's
  K/V (165 MB a window) pushed out of L2; the outputs (99 MB) of all but the last are pushed out
  before they are read. By that count stock reads {stock_late} MB again and ours {our_late},
  {late_gap} MB less; measured, code taken off: {big_gap} MB.
"""


Medians = dict[tuple[int, int], dict[str, float]]
"""MB of each way by (requests, drafts)."""


def medians(rows: pd.DataFrame, field: str) -> Medians:
    """The median over rounds."""
    found = rows.groupby([*CASE, "way"], sort=False)[field].median().unstack("way")
    return {(int(a), int(b)): dict(line) for (a, b), line in found.iterrows()}


def text_of(rows: pd.DataFrame, facts: Facts) -> str:
    """The whole page."""
    read, written = medians(rows, "read_mb"), medians(rows, "written_mb")
    small, big, least = (8, 4), (64, 8), (1, 1)
    tokens = {case: case[0] * (case[1] + 1) for case in (small, big)}
    values = SHAPE.heads * SHAPE.head_dim * SHAPE.layers
    output = {case: count * values * 2 / 1e6 for case, count in tokens.items()}
    splits = tokens[small] * (values + values // SHAPE.head_dim) * 4 * 2 / 1e6
    late_bytes = tokens[big] * SHAPE.row_bytes * SHAPE.layers / 1e6 + 2 * output[big]
    pairs = big[0] * SHAPE.kv_heads
    late = {way: (1 - count / pairs) * late_bytes for way, count in PROGRAMS.items()}
    own = SHAPE.layers * SHAPE.row_bytes * _context(rows[rows["requests"] == 1]) / 1e6
    code = {way: _kb(read[least][way] - own) for way in (STOCK, OURS, COPIED)}
    cached = big[0] * SHAPE.row_bytes * _context(rows[rows["requests"] > 1]) / 1e6
    gaps = {case: read[case][OURS] - read[case][STOCK] for case in (small, big, least)}
    apart, outliers = _scatter(rows)
    return TEXT.format(
        command=facts["command"],
        machine=machine_of(facts, ("vllm", "torch", "triton")),
        note=note_of(facts),
        context=_context(rows[rows["requests"] > 1]),
        rounds=rows["round"].nunique(),
        apart=f"{apart:.2f}",
        outliers=outliers,
        table=_table(read, written),
        ways="\n".join(f"- `{way}`: {what}." for way, what in WAYS.items()),
        splits=_splits(rows),
        split_mb=f"{written[small]['attend'] - written[small]['attend, 1 split']:.2f}",
        split_model=f"{splits:.2f}",
        no_split_mb=f"{written[big]['attend'] - written[big]['attend, 1 split']:+.2f}",
        ours_mb=f"{written[small]['nwor']:.2f}",
        output_mb=f"{output[small]:.2f}",
        spilled_mb=f"{written[big]['nwor'] - output[big]:.2f}",
        big_output_mb=f"{output[big]:.2f}",
        write_code=_kb(read[least]["write"]),
        cached=f"{cached:.0f}",
        stock_code=code[STOCK],
        our_code=code[OURS],
        copy_code=code[COPIED],
        small_gap=f"{gaps[small]:+.2f}",
        small_copy_gap=f"{read[small][COPIED] - read[small][STOCK]:+.2f}",
        stock_programs=PROGRAMS[STOCK],
        our_programs=PROGRAMS[OURS],
        stock_late=f"{late[STOCK]:.0f}",
        our_late=f"{late[OURS]:.0f}",
        late_gap=f"{late[STOCK] - late[OURS]:.0f}",
        big_gap=f"{gaps[big] - gaps[least]:+.0f}",
    )


def _kb(megabytes: float) -> str:
    return f"{megabytes * 1e3 / SHAPE.layers:.0f}"


def _one(rows: pd.DataFrame, column: str) -> Any:
    (value,) = rows[column].unique()
    return value


def _context(rows: pd.DataFrame) -> int:
    return int(_one(rows, "context"))


def _splits(rows: pd.DataFrame) -> str:
    """`8 x 4: 2 in full graphs, 2 eagerly; ...`, of the cases that are more than one request."""
    shown = []
    for (requests, drafts), group in rows[rows["requests"] > 1].groupby(CASE):
        graphs, eager = (_one(group, f"splits, {how}") for how in ("full graphs", "eager"))
        shown.append(f"{requests} x {drafts}: {graphs} in full graphs, {eager} eagerly")
    return "; ".join(shown)


def _scatter(rows: pd.DataFrame, most: float = 1.0) -> tuple[float, str]:
    """How far rounds lie from their way's median, MB, and those further away than `most`."""
    fields = ["read_mb", "written_mb"]
    apart = (rows[fields] - rows.groupby([*CASE, "way"])[fields].transform("median")).abs()
    far = apart.max(axis=1) > most
    names = [
        f"round {row['round'] + 1} of `{row['way']}` at {row['requests']} x {row['drafts']}"
        for row in rows[far].to_dict("records")
    ]
    return float(apart[~far].max().max()), ", ".join(names) or "none"


def _table(read: Medians, written: Medians) -> str:
    lines = [
        {"way": way}
        | {
            f"{what}, {requests} x {drafts}": _shown(what, way, found[(requests, drafts)])
            for requests, drafts in read
            for what, found in (("read", read), ("written", written))
        }
        for way in WAYS
    ]
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))


def _shown(what: str, way: str, found: dict[str, float]) -> str:
    """MB; nothing for what the reader of an output writes, which is none of the way's."""
    return "" if what == "written" and way.endswith("read") else f"{found[way]:,.2f}"


if __name__ == "__main__":
    here = Path(__file__).parent
    write_page(here / "attention.csv", here / "README.md", text_of)
