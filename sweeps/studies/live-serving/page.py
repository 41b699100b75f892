"""README.md from serving.csv: python sweeps/studies/live-serving/page.py"""

from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent

TEXT = """# What does taking turns cost a server?

Under `vllm bench serve` (open loop, Poisson) at 50 % and 90 % of capacity {requests} requests were
sent to a server with `VLLM_NWOR_MODE=interleave`: {failed} failed, greedy answers were those of
stock vLLM, staging never stopped. **What it costs is not known yet**: this ran on two cores of a
CPU that other work kept busy, so times below differ for reasons of their own.

    python sweeps/studies/live-serving/measure.py --pair tiny --seconds 10 --most 4 --input 64 \\
      --tokens 64 --flags "--kv-cache-memory-bytes 200000000 --enforce-eager --block-size 32" \\
      --modes stock interleave --output DIR

AMD EPYC (AVX2), two cores, vLLM 0.32.0; the pair `tiny` with its draft model, four drafts.
Capacity: {most} requests/s, all sent at once. TPOT: time for an output token behind the first.
[serving.csv](serving.csv) has all numbers, `page.py` made this page.

{table}

Groups: those that the server compared, and those that it left out, both since its start.

On an H200 stock vLLM alone was measured before time ran out; `stage` and `interleave` were not.
"""


def text_of(rows: pd.DataFrame) -> str:
    """The whole page."""
    loads = rows[rows.rate.notna()]
    turns = loads[loads["mode"] == "interleave"]
    assert turns.same_answers.all()
    assert (turns.nwor_live_staging_stopped_total == 0).all()
    table = [
        {
            "mode": row["mode"],
            "load": row.load,
            "requests": row.completed,
            "failed": row.failed,
            "TPOT p50, ms": f"{row.median_tpot_ms:.1f}",
            "tokens/s": f"{row.output_throughput:.0f}",
            "groups": ""
            if pd.isna(row.nwor_live_groups_total)
            else f"{row.nwor_live_groups_total:.0f}, {row.nwor_live_groups_left_out_total:.0f}",
        }
        for _, row in loads.iterrows()
    ]
    return TEXT.format(
        requests=int(turns.completed.sum()),
        failed=int(turns.failed.sum()) or "none",
        most=f"{rows.request_throughput.iloc[0]:.1f}",
        table=pd.DataFrame(table).to_markdown(index=False, disable_numparse=True),
    )


if __name__ == "__main__":
    (HERE / "README.md").write_text(text_of(pd.read_csv(HERE / "serving.csv")))
