"""README.md from hook-parts.csv and nvtx.csv: python sweeps/studies/hook-cost/page.py"""

from pathlib import Path

import pandas as pd

TEXT = """# What do the hooks cost?

Stage x graph adds {graph:.0f} us of host time a window at {requests} requests, stage x adaptive
{adaptive:.0f} and off x off {off:.0f}. NVTX ranges cost less than {most:.1f} %; no cost was seen.

## Host time, part by part

    {command}

One {gpu}, torch {torch}; the 3B shape, {requests} requests x 4 drafts, full CUDA graphs.
Microseconds of the host: the median and, in brackets, the 10 % and 90 % quantiles, over the windows
of one batch ([hook-parts.csv](hook-parts.csv)).

{cells}

With a clock around every part, stage x adaptive (which launches the commit eagerly). `again`: the
same call a second time at once.

{parts}

- `launch of the commit` holds `cuLaunchKernelEx`; `window.commit` holds the launch.
- `loop` is a hundred multiplications in Python, `torch kernel` an `add_` to eight numbers: neither
  is of the hooks.

## NVTX ranges

    {nvtx_command}

One {nvtx_gpu}, driver {driver}, vLLM {vllm}, torch {nvtx_torch}; 16 cores, nothing else running,
CUPTI listening. Times with ranges over those without, and of two runs without over each other, with
their 95 % intervals ([nvtx.csv](nvtx.csv)):

{nvtx}
"""


def text_of(parts: pd.DataFrame, nvtx: pd.DataFrame) -> str:
    """The whole page."""
    cells = parts[parts["kind"] == "cell"]
    median = cells.set_index("name")["median_us"]
    first, ranges = parts.iloc[0], nvtx.iloc[0]
    return TEXT.format(
        graph=median["stage x graph"],
        adaptive=median["stage x adaptive"],
        off=median["off x off"],
        most=100 * (ranges["ratio_high"] - 1),
        requests=first["requests"],
        command=first["command"],
        gpu=first["gpu"],
        torch=first["torch"],
        cells=_table(cells, "cell", "hooks"),
        parts=_table(parts[parts["kind"] == "part"], "part", "in a window"),
        nvtx_command=ranges["command"],
        nvtx_gpu=ranges["gpu"],
        driver=ranges["driver"],
        vllm=ranges["vllm"],
        nvtx_torch=ranges["torch"],
        nvtx="\n".join(
            f"- {row['pair']}, {row['n']} blocks: {row['what']} = {row['ratio']:.4f} "
            f"[{row['ratio_low']:.4f}, {row['ratio_high']:.4f}]"
            for row in nvtx.to_dict("records")
        ),
    )


def _table(rows: pd.DataFrame, heading: str, first: str) -> str:
    lines: dict[str, dict[str, str]] = {}
    for row in rows.to_dict("records"):
        shown = f"{row['median_us']:.1f} [{row['p10_us']:.1f}, {row['p90_us']:.1f}]"
        column = first if row["call"] == "in a window" else row["call"]
        lines.setdefault(row["name"], {heading: row["name"]})[column] = shown
    frame = pd.DataFrame(lines.values()).fillna("")
    return str(frame.to_markdown(index=False))


if __name__ == "__main__":
    here = Path(__file__).parent
    text = text_of(pd.read_csv(here / "hook-parts.csv"), pd.read_csv(here / "nvtx.csv"))
    (here / "README.md").write_text(text, encoding="utf-8")
