"""README.md from tiles.csv: python sweeps/studies/attention-tiles/page.py"""

from pathlib import Path

import pandas as pd
import torch

from nwor_kernels.verify_attention.tuning import launch_shape, programs_on

HERE = Path(__file__).parent
WINDOW, LATENT_DIM = 5, 512
PROCESSORS = 132
"""Multiprocessors of an H200."""

CHOICES = ("rows", "block_n", "num_warps", "num_stages", "merged", "programs")

TEXT = """# Which tiles serve which heads?

Attention of one layer while NWOR stages, against FlashAttention 3 as stock vLLM calls it: by the
rules of `launch_shape` dense heads take {least:.2f} to {most:.2f} times as long. No variant that
was tried beats the rules by more than {missed:.0f} %. Latent heads take up to {latent:.1f} times as
long, so in windows of equal length FlashAttention attends their context itself.

    python sweeps/studies/attention-tiles/measure.py --output tiles.csv

{device}, torch 2.11, Triton 3.6. Windows of 5 tokens over 1,250 tokens of context in bf16;
microseconds a call, medians of 30 rounds in which all variants of a case take turns, each call on
K/V of its own, read from DRAM. [tiles.csv](tiles.csv) has every variant with its error against
float32, `page.py` made this page: "rules" is the time of the variant that they choose today.

{table}

"Before" is the variant that the rules chose before this was measured.

- **Rows of a tile.** 64 query rows run on a warp group's matrix instructions, 32 and fewer on those
  of single warps, which take two to three times as long a row. So padding 20 or 40 rows to 64 is
  better than cutting them into smaller tiles.
- **Parts of a pair.** Where few (request, K/V head) pairs are cut into many parts, merging them
  takes as long as attending: one program a multiprocessor is then better than two.
- **Latent heads** share one K/V head, so each tile reads the whole context again and its parts are
  four times as large.

fp8 caches and other GPUs were not measured; they follow the same rules.
"""


def by_rules(case: pd.Series, ours: pd.DataFrame) -> pd.Series:
    """The variant that today's rules choose; a latent launch's own is the first."""
    if case.head_dim == LATENT_DIM:
        return ours.iloc[0]
    cpu = torch.device("cpu")  # whose launches have an H200's shared memory
    shape = launch_shape(WINDOW, case.heads // case.kv_heads, case.head_dim, 2, cpu)
    pairs = case.requests * case.kv_heads * shape.row_tiles
    programs = programs_on(PROCESSORS, shape.rows, shape.dim, pairs)
    return variant(ours, shape.rows, shape.block_n, programs, shape.merged)


def by_earlier_rules(case: pd.Series, ours: pd.DataFrame) -> pd.Series:
    """The variant that they chose before: the least power of two of rows, two programs a
    multiprocessor but for large tiles."""
    if case.head_dim == LATENT_DIM:
        return variant(ours, 64, 32, PROCESSORS)
    folded = int(WINDOW * case.heads // case.kv_heads)
    rows = max(16, 1 << (folded - 1).bit_length())
    size = rows * case.head_dim
    programs = PROCESSORS * (2 if size <= 64 * 128 else 1)
    step = 32 if case.head_dim > 128 else 64
    return variant(ours, rows, step, programs, max(1, min(4, 64 * 128 // size)))


def variant(
    ours: pd.DataFrame, rows: int, step: int, programs: int, merged: int | None = None
) -> pd.Series:
    """The measured one with these choices; latent variants differ in no `merged`."""
    chosen = (ours.rows == rows) & (ours.block_n == step) & (ours.programs == programs)
    return ours[chosen if merged is None else chosen & (ours.merged == merged)].iloc[0]


def said(row: pd.Series) -> str:
    """`rows 64, block_n 32`: what a variant chooses."""
    return ", ".join(f"{name} {row[name]:.0f}" for name in CHOICES if pd.notna(row.get(name)))


def cases(rows: pd.DataFrame) -> list[dict[str, object]]:
    """A row a case: FlashAttention, the rules, and the fastest variant."""
    found: list[dict[str, object]] = []
    for (model, requests), own in rows.groupby(["model", "requests"], sort=False):
        own = own[~own.wrong | own.peer.notna()]
        peer = own[own.peer.notna()].iloc[0]
        ours = own[own.peer.isna()]
        rules, before = by_rules(own.iloc[0], ours), by_earlier_rules(own.iloc[0], ours)
        best = ours.loc[ours.us.idxmin()]
        found.append(
            {"model": model, "requests": requests, "peer": peer.us, "rules": rules.us,
             "before": before.us, "best": best.us, "chosen": said(best) or "the rules",
             "latent": rules.head_dim == LATENT_DIM}
        )  # fmt: skip
    return found


def text_of(rows: pd.DataFrame) -> str:
    """The whole page."""
    found = cases(rows)
    table = [
        {
            "heads of": case["model"],
            "requests": f"{case['requests']}",
            "FlashAttention 3": f"{case['peer']:.1f}",
            "before": f"{case['before']:.1f}",
            "rules": f"{case['rules']:.1f}",
            "ratio": f"{case['rules'] / case['peer']:.2f}",
            "fastest variant": f"{case['best']:.1f}",
            "it has": case["chosen"],
        }
        for case in found
    ]
    ratios = [case["rules"] / case["peer"] for case in found]
    latent = [ratio for ratio, case in zip(ratios, found, strict=True) if case["latent"]]
    dense = [ratio for ratio, case in zip(ratios, found, strict=True) if not case["latent"]]
    return TEXT.format(
        least=min(dense),
        most=max(dense),
        latent=max(latent),
        missed=100 * (max(case["rules"] / case["best"] for case in found) - 1),
        device=rows.device.iloc[0],
        table=pd.DataFrame(table).to_markdown(index=False, disable_numparse=True),
    )


if __name__ == "__main__":
    (HERE / "README.md").write_text(text_of(pd.read_csv(HERE / "tiles.csv")))
