"""README.md from serving.csv: python sweeps/studies/live-serving/page.py"""

from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
MODES = ("stock", "stage", "interleave")

TEXT = """# What does taking turns cost a server?

Under `vllm bench serve` (open loop, Poisson) at 50 % and 90 % of capacity {requests:,} requests
were sent to servers in `stage` and `interleave`: {failed} failed, greedy answers were those of
stock vLLM, staging never stopped. **Staging made a server slower**: on an H200 a token took
{slowest_half:.0f} % longer in `stage` and {turns_half:.0f} % longer in `interleave` at 50 % of
capacity, {slowest_most:.0f} % and {turns_most:.0f} % longer at 90 %, though windows alone take less
time there. So windows beside a prefill are now written directly (`VLLM_NWOR_BESIDE_PREFILL`). That
has been measured on a CPU alone, where hooks take most of a toy target's time: stage still costs
{cpu_half:.0f} %.

    python sweeps/studies/live-serving/measure.py --pair llama-3b-shape --seconds 5 --rounds 3 \\
      --output DIR --flags "--max-num-batched-tokens 8192 --kv-cache-memory-bytes 25000000000
      --compilation-config '{{\\"mode\\":0,\\"cudagraph_mode\\":\\"FULL_DECODE_ONLY\\",
      \\"cudagraph_capture_sizes\\":[5,10,20,40,80,160,320]}}'"
    python sweeps/studies/live-serving/measure.py --pair tiny --seconds 10 --rounds 3 --most 4 \\
      --input 64 --tokens 64 --output DIR \\
      --flags "--kv-cache-memory-bytes 200000000 --enforce-eager --block-size 32"

All servers are up at once and get the same load one after the other, in an order drawn anew in each
round. TPOT: time for an output token behind the first, its median over a load's requests; then the
median over rounds, and the least and most of its ratio to stock's in the same round.
[serving.csv](serving.csv) has every load, `page.py` made this page.

## One H200, windows beside prefills staged

The 3B shape, k = 4, 512 tokens in and 128 out; vLLM 0.32.0, torch 2.11. Another process ran on the
host's other GPU, and time was up in the third round. Stock took {h200_capacity:.0f} requests/s, all
sent at once.

{h200}

The cause is inferred, not profiled. In batches of the same shape windows alone take 2 to 3 % less
time in `stage` ([interleave](../interleave/README.md)), so it must be the steps with a prefill.
They run outside of full CUDA graphs, where the host sets the pace; staging adds two launches to
each of their layers (a copy of the drafts, attention over them) and saves nothing, since the
prefill's rows are written anyway.

## Two cores of a CPU, windows beside prefills written directly

AMD EPYC (AVX2), vLLM 0.32.0; the pair `tiny` with its draft model, four drafts. Stock took
{cpu_capacity:.1f} requests/s. Three servers share the two cores, so that one is never quite alone.
A target of two small layers makes the most of what hooks cost.

{cpu}

## What is not known

Whether TPOT stays within 1 % of stock's on a GPU, now that prefills are left alone.
"""


def loads(rows: pd.DataFrame, machine: str) -> pd.DataFrame:
    """Its open-loop loads."""
    return rows[(rows.machine == machine) & rows.rate.notna()]


def beside_stock(rows: pd.DataFrame) -> pd.Series:
    """Ratio of the median TPOT to stock's, by mode, load and round."""
    times = rows.set_index(["mode", "load", "round"]).median_tpot_ms
    stock = times.xs("stock", level="mode")
    return (times / stock).dropna().reorder_levels(["mode", "load", "round"]).sort_index()


def slower(rows: pd.DataFrame, mode: str, load: str) -> float:
    """How much longer a token takes there, in per cent: the median over rounds."""
    return 100 * (float(beside_stock(rows)[mode, load].median()) - 1)


def table_of(rows: pd.DataFrame) -> str:
    """A row a mode and load."""
    ratios = beside_stock(rows)
    table = []
    for load in sorted(rows.load.unique()):
        for mode in MODES:
            own = rows[(rows["mode"] == mode) & (rows.load == load)]
            found = ratios[mode, load]
            table.append(
                {
                    "mode": mode,
                    "load": load,
                    "rounds": len(own),
                    "requests": int(own.completed.sum()),
                    "TPOT p50, ms": f"{own.median_tpot_ms.median():.2f}",
                    "over stock's": ""
                    if mode == "stock"
                    else f"{found.median():.2f} ({found.min():.2f} to {found.max():.2f})",
                    "tokens/s": f"{own.output_throughput.median():,.0f}",
                }
            )
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def capacity(rows: pd.DataFrame, machine: str) -> float:
    """Requests a second of stock vLLM, all sent at once."""
    return float(rows[(rows.machine == machine) & rows.rate.isna()].request_throughput.iloc[0])


def text_of(rows: pd.DataFrame) -> str:
    """The whole page."""
    h200, cpu = loads(rows, "h200"), loads(rows, "cpu")
    ours = rows[rows.rate.notna() & (rows["mode"] != "stock")]
    assert ours.same_answers.all()
    assert (ours.nwor_live_staging_stopped_total.fillna(0) == 0).all()
    return TEXT.format(
        requests=int(ours.completed.sum()),
        failed=int(ours.failed.sum()) or "none",
        slowest_half=slower(h200, "stage", "50%"),
        turns_half=slower(h200, "interleave", "50%"),
        slowest_most=slower(h200, "stage", "90%"),
        turns_most=slower(h200, "interleave", "90%"),
        cpu_half=slower(cpu, "stage", "50%"),
        h200_capacity=capacity(rows, "h200"),
        cpu_capacity=capacity(rows, "cpu"),
        h200=table_of(h200),
        cpu=table_of(cpu),
    )


if __name__ == "__main__":
    (HERE / "README.md").write_text(text_of(pd.read_csv(HERE / "serving.csv")))
