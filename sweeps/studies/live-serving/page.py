"""README.md from serving.csv and steps.csv: python sweeps/studies/live-serving/page.py"""

from pathlib import Path

import pandas as pd
from scipy.stats import quantile_test

HERE = Path(__file__).parent
MODES = ("stock", "off", "stage", "interleave")
DIRECT = ("h200 compiled", "h200", "h200 short")
"""Machines whose servers wrote drafts directly beside prefills."""

TEXT = """# What does staging cost a server, and what does taking turns?

On an H200 a token took {staged_half:.2f} times stock vLLM's time at 50 % of capacity and
{staged_most:.2f} times at 90 % while drafts were staged beside prefills too. Since they are written
directly there, a server in `stage` takes {half} times stock's time at 50 %,
one in `interleave` {turns} (median of {rounds} rounds with its 95 % interval).
Rounds scatter too much to tell 1 %. Tokens/s come to {speed_low:.2f} to {speed_high:.2f} times
stock's (medians of both modes and loads). Of {requests:,} requests to servers in `stage` and
`interleave` {failed} failed, greedy answers were those of stock vLLM (on a
CPU those of off), and staging never stopped.

    python sweeps/studies/live-serving/measure.py --pair llama-3b-shape --seconds 5 --rounds 3 \\
      --output DIR --flags "--max-num-batched-tokens 8192 --kv-cache-memory-bytes 25000000000
      --compilation-config '{{\\"mode\\":0,\\"cudagraph_mode\\":\\"FULL_DECODE_ONLY\\",
      \\"cudagraph_capture_sizes\\":[5,10,20,40,80,160,320]}}'"      # without it: compiled
    ... --seconds 1.5 --rounds 60 --loads 50% 90% ...                # short rounds
    python sweeps/studies/live-serving/measure.py --pair tiny --modes off stage interleave \\
      --seconds 8 --rounds 4 --most 4 --input 64 --tokens 64 --output DIR \\
      --flags "--kv-cache-memory-bytes 200000000 --enforce-eager --block-size 32"

`vllm bench serve`, open loop (Poisson). All servers are up at once and get the same load one after
the other, in an order drawn anew in each round. TPOT: time for an output token behind the first,
its median over a load's requests; then the median over rounds, and the least and most of its ratio
to stock's in the same round. On GPUs: the 3B shape, k = 4, 512 tokens in and 128 out; vLLM 0.32.0,
torch 2.11; the host's other GPU was in use, except with short rounds. [serving.csv](serving.csv)
has every load, `page.py` made this page.

## One H200, drafts beside a prefill written directly

vLLM's default flags: compiled, full and piecewise CUDA graphs. Stock took {compiled_capacity:.0f}
requests/s, all sent at once. In the first round stage and interleave came first, and were a third
slower; it was measured like the others.

{compiled}

Full CUDA graphs for windows alone, nothing compiled. Stock took {plain_capacity:.0f} requests/s.

{plain}

The same with rounds of 1.5 s a load, on a machine of one H200 whose host is slow, until its time
was up. Stock took {short_capacity:.0f} requests/s.

{short}

Of all rounds at 90 %, stage takes {most} times stock's time and interleave
{turns_most}. Shorter rounds scatter about as much as longer ones.

## One H200, drafts beside a prefill staged too

What `VLLM_NWOR_BESIDE_PREFILL=stage` does; nothing compiled, another host. Stock took
{staged_capacity:.0f} requests/s; time was up in the third round.

{staged}

## Which steps take longer?

    python sweeps/studies/live-serving/steps.py --output DIR

Every step of one engine that requests reach like a server's; stock (no hooks), off, stage, beside
(staged beside prefills too) and interleave in turn, 2 s each, three blocks at 38 and three at 66
requests/s. Medians of the blocks' median step, ms ([steps.csv](steps.csv)):

{steps}

A step with a prefill runs outside of full CUDA graphs, where the host sets the pace. Staging there
adds two launches a layer (a copy of the drafts, attention over them) and saves nothing: the step
writes the prefill's rows anyway. It takes {beside_low:.1f} to {beside_high:.1f} times as long as in
off, block by block. Written directly (stage) it takes {stage_low:.1f} to {stage_high:.1f} times as
long, which this host does not tell from 1: stock over off, which run the same code there, is
{stock_low:.1f} to {stock_high:.1f}.

## Two cores of a CPU

AMD EPYC (AVX2), vLLM 0.32.0; the pair `tiny` with its draft model, four drafts. The plugin brings
an attention of its own for every mode there, so stage and interleave are compared with off. Off
took {cpu_capacity:.1f} requests/s, all sent at once.

{cpu}

Interleave lies between the two, as it should. A target of two small layers makes the most of what
hooks cost.

## What is not known

Whether TPOT stays within 1 % of the better of stock and stage: that takes more rounds on a quieter
host. These servers added up a second's counts in one step; now it is two steps' at a time.
"""


def loads(rows: pd.DataFrame, machine: str) -> pd.DataFrame:
    """Its open-loop loads."""
    return rows[(rows.machine == machine) & rows.rate.notna()]


def beside_first(rows: pd.DataFrame, column: str = "median_tpot_ms") -> pd.Series:
    """Ratio of a column to that of stock (on a CPU of off), by mode, load and round."""
    values = rows.set_index(["mode", "load", "round"])[column]
    first = values.xs(first_of(rows), level="mode")
    return (values / first).dropna().reorder_levels(["mode", "load", "round"]).sort_index()


def first_of(rows: pd.DataFrame) -> str:
    """The mode that the others are compared with."""
    return next(mode for mode in MODES if mode in set(rows["mode"]))


def over_first(rows: pd.DataFrame, mode: str, load: str) -> float:
    """A token's time over stock's: the median over rounds."""
    return float(beside_first(rows)[mode, load].median())


def table_of(rows: pd.DataFrame) -> str:
    """A row a load and mode."""
    times, first = beside_first(rows), first_of(rows)
    speeds = beside_first(rows, "output_throughput")
    table = []
    for load in sorted(rows.load.unique()):
        for mode in [mode for mode in MODES if mode in set(rows["mode"])]:
            own = rows[(rows["mode"] == mode) & (rows.load == load)]
            is_first = mode == first
            table.append(
                {
                    "mode": mode,
                    "load": load,
                    "rounds": len(own),
                    "requests": f"{own.completed.sum():,.0f}",
                    "TPOT p50, ms": f"{own.median_tpot_ms.median():.2f}",
                    f"over {first}'s": "" if is_first else scattered(times[mode, load]),
                    "tokens/s": f"{own.output_throughput.median():,.0f}",
                    f"over {first}": "" if is_first else scattered(speeds[mode, load]),
                }
            )
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def scattered(ratios: pd.Series) -> str:
    """`1.02 (0.96 to 1.34)`."""
    return f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def capacity(rows: pd.DataFrame, machine: str) -> float:
    """Requests a second of stock vLLM, all sent at once."""
    return float(rows[(rows.machine == machine) & rows.rate.isna()].request_throughput.iloc[0])


def over_stock(rows: pd.DataFrame, mode: str, load: str) -> pd.Series:
    """Its ratios to stock, of every round on each machine."""
    machines = [beside_first(loads(rows, name))[mode, load] for name in DIRECT]
    return pd.concat(machines)


def with_interval(ratios: pd.Series) -> str:
    """`0.96 [0.93, 1.05]`: the median, and what a sign test of it does not reject."""
    interval = quantile_test(ratios.to_numpy()).confidence_interval()
    return f"{ratios.median():.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def step_table(steps: pd.DataFrame) -> str:
    """A row a kind of step and rate, a column a mode."""
    table = (
        steps.groupby(["kind", "rate", "mode"])
        .ms.median()
        .unstack("mode")[["stock", "off", "stage", "interleave", "beside"]]
        .map("{:.1f}".format)
        .reset_index()
        .rename(columns={"kind": "step", "rate": "requests/s"})
    )
    table["requests/s"] = table["requests/s"].map("{:.0f}".format)
    return table.to_markdown(index=False, disable_numparse=True)


def over_off(steps: pd.DataFrame, mode: str) -> pd.Series:
    """A step with a prefill over off's in the same block."""
    own = steps[steps.kind == "with a prefill"]
    by_mode = own.pivot_table(index=["rate", "block"], columns="mode", values="ms")
    return by_mode[mode] / by_mode["off"]


def text_of(rows: pd.DataFrame, steps: pd.DataFrame) -> str:
    """The whole page."""
    ours = rows[rows.rate.notna() & rows["mode"].isin(["stage", "interleave"])]
    assert ours.same_answers.all()
    assert (ours.nwor_live_staging_stopped_total.fillna(0) == 0).all()
    half, turns, most, turns_most = (
        over_stock(rows, mode, load) for load in ("50%", "90%") for mode in ("stage", "interleave")
    )
    staged = loads(rows, "h200 staged")
    speeds = [beside_first(loads(rows, name), "output_throughput") for name in DIRECT]
    medians = pd.concat([each.drop("stock").groupby(["mode", "load"]).median() for each in speeds])
    return TEXT.format(
        requests=int(ours.completed.sum()),
        failed=int(ours.failed.sum()) or "none",
        staged_half=over_first(staged, "stage", "50%"),
        staged_most=over_first(staged, "stage", "90%"),
        half=with_interval(half),
        turns=with_interval(turns),
        most=with_interval(most),
        turns_most=with_interval(turns_most),
        rounds=len(half),
        speed_low=medians.min(),
        speed_high=medians.max(),
        **{
            f"{mode}_{name}": getattr(over_off(steps, mode), each)()
            for mode in ("beside", "stage", "stock")
            for name, each in (("low", "min"), ("high", "max"))
        },
        compiled_capacity=capacity(rows, "h200 compiled"),
        plain_capacity=capacity(rows, "h200"),
        short_capacity=capacity(rows, "h200 short"),
        staged_capacity=capacity(rows, "h200 staged"),
        cpu_capacity=capacity(rows, "cpu"),
        compiled=table_of(loads(rows, "h200 compiled")),
        plain=table_of(loads(rows, "h200")),
        short=table_of(loads(rows, "h200 short")),
        staged=table_of(staged),
        steps=step_table(steps),
        cpu=table_of(loads(rows, "cpu")),
    )


if __name__ == "__main__":
    page = text_of(pd.read_csv(HERE / "serving.csv"), pd.read_csv(HERE / "steps.csv"))
    (HERE / "README.md").write_text(page, encoding="utf-8")
