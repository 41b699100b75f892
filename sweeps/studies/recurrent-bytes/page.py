"""README.md from states.csv: python sweeps/studies/recurrent-bytes/page.py"""

from pathlib import Path

import pandas as pd

from nwor_bench.cli.plan_flags import load_configs, predict
from nwor_bench.models.byte_model import Workload
from nwor_bench.models.recurrent import STOCK, state_bytes

HERE = Path(__file__).parent
PAIR = "qwen3-next-shape"
CONTEXT = 280
"""Cached tokens of a request in the middle of a counted batch: 256 of its prompt, and half of the
48 that it generates."""

MB = 1e6

TEXT = """# What does stock vLLM move of a hybrid's recurrent states?

It stores a state at every position of the window: another draft adds {position_low:.1f} to
{position_high:.1f} MB of DRAM writes a request, of which a state and a column of its convolution
are {position:.1f}, as predicted. Reads grow by {read_low:.0f} to {read_high:.0f} MB a request; one
state and the K/V of its context are {read:.0f}. States are {share_low:.0f} to {share_high:.0f} % of
what a window writes.

    python sweeps/studies/recurrent-bytes/measure.py --output DIR

One NVIDIA H200 (vLLM 0.32.0, torch 2.11), eager, mode off; vLLM's own kernels, nothing of ours but
the counters. Qwen3-Next's {layers} gated delta nets and 12 attention layers with 4 experts for its
512, prompts of 256 tokens, two tokens gained a window. The state is in bfloat16 here, the dtype of
the model: {state:.1f} MB a request in all layers. A checkpoint that asks for float32 has twice
that. Medians of {windows} windows in MB; copies of known size were counted within
{off:.2f} %. [states.csv](states.csv) has the numbers, `page.py` made this page.

{table}

"Predicted" is `nwor-bench plan`'s: states and inputs of the convolution, and for reads the weights
and the K/V of {context} tokens too.

- **The rest of the writes grows with tokens**: {rest_low:.1f} to {rest_high:.1f} MB a token from 2
  requests on, whatever the number of drafts. The model leaves out activations, which an eager
  engine writes in every layer. That these are all of the rest is inferred, not measured.
- **What drafts add could be saved.** One state a request on acceptance instead of one at every
  position would take {saved_low:.0f} to {saved_high:.0f} % off the writes, if it costs nothing else
  (`plan` has the ways and what they cost). The plugin stages attention layers alone.
"""


def predicted(row: pd.Series) -> tuple[float, float, float]:
    """Bytes read, bytes of states written, and what one state a request would save."""
    drafts, requests = int(row.draft_tokens), int(row.requests)
    load = Workload(requests, CONTEXT, drafts, acceptance=1 / drafts)
    (config,) = load_configs([], None, PAIR)
    model = predict(config, load, "auto", "auto").model
    recurrent = model.shape.recurrent
    assert recurrent is not None
    assert recurrent.state_bytes() == row.state_bytes
    states = state_bytes(recurrent, STOCK, model.states(load))
    read = states.read + model.weights_read(load) + model.context_read(load)
    return read, states.written, requests * drafts * recurrent.state_bytes()


def slopes(rows: pd.DataFrame, column: str) -> pd.Series:
    """MB that one more request adds, between the two largest batches, by drafts."""
    most, next_most = sorted(rows.requests.unique())[:-3:-1]
    by_size = rows.pivot_table(index="draft_tokens", columns="requests", values=column)
    return (by_size[most] - by_size[next_most]) / (most - next_most) / MB


def a_draft(slope: pd.Series) -> pd.Series:
    """What each further draft adds to these slopes."""
    drafts = slope.index.to_series()
    return (slope.diff() / drafts.diff()).dropna()


def text_of(rows: pd.DataFrame) -> str:
    """The whole page."""
    told = rows.apply(predicted, axis=1, result_type="expand")
    rows = rows.assign(read=told[0], written=told[1], saved=told[2])
    tokens = rows.requests * (rows.draft_tokens + 1)
    rows["rest"] = (rows.written_bytes - rows.written) / tokens / MB
    rest = rows.rest[rows.requests > 1]
    table = [
        {
            "drafts": f"{row.draft_tokens:.0f}",
            "requests": f"{row.requests:.0f}",
            "read": f"{row.read_bytes / MB:,.0f}",
            "predicted": f"{row.read / MB:,.0f}",
            "written": f"{row.written_bytes / MB:,.0f}",
            "states, predicted": f"{row.written / MB:,.0f}",
            "rest a token": f"{row.rest:.1f}",
        }
        for _, row in rows.iterrows()
    ]
    written, read = slopes(rows, "written_bytes"), slopes(rows, "read_bytes")
    positions, stored = a_draft(written), a_draft(slopes(rows, "written"))
    share, saved = rows.written / rows.written_bytes, rows.saved / rows.written_bytes
    return TEXT.format(
        position_low=positions.min(),
        position_high=positions.max(),
        position=stored.iloc[0],
        read_low=read.min(),
        read_high=read.max(),
        read=slopes(rows, "read").max(),
        share_low=100 * share.min(),
        share_high=100 * share.max(),
        layers=rows.layers.iloc[0],
        state=rows.state_bytes.iloc[0] / MB,
        windows=rows.windows.iloc[0],
        off=100 * (rows.copy_ratio - 1).abs().max(),
        context=CONTEXT,
        table=pd.DataFrame(table).to_markdown(index=False, disable_numparse=True),
        rest_low=rest.min(),
        rest_high=rest.max(),
        saved_low=100 * saved.min(),
        saved_high=100 * saved.max(),
    )


if __name__ == "__main__":
    page = text_of(pd.read_csv(HERE / "states.csv"))
    (HERE / "README.md").write_text(page, encoding="utf-8")
