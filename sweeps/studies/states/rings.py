"""What do rings of records cost the kernels? Verify and commit with and without them, on one GPU.

    python sweeps/studies/states/rings.py own-rings.csv

12 layers of Qwen3.5-27B's shape (16 key heads, 48 value heads of 128 x 128) in one CUDA graph,
median of 20 replays; at 1 request the states stay in the GPU's L2. Rings are timed with 0, 5 and 11
live rows, their commit with none, a fifth and all of the requests' rings full. What the kernels
compute is held against float64 by tests/kernels/test_gated_delta_rings.py, not here.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton
from nwor_kernels.gated_delta.records import (
    GatedNorm,
    RecordRings,
    WindowInputs,
    allocate_records,
)
from nwor_kernels.limits import RECORD_ROWS

KEY_HEADS, VALUE_HEADS, DIM, LAYERS = 16, 48, 128, 12
SIZES = ((1, 4), (8, 4), (32, 4), (128, 4), (32, 8))
"""Requests, and drafts of each."""
ACCEPTED = 3
"""Tokens of each window."""
FULL = 11
"""Live rows of a ring that has no room for another window of five."""


def us_a_layer(launch: Callable[[], None], repeats: int = 20) -> float:
    """Median time of a captured launch of all layers, a layer's share, in microseconds."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times) * 1e3 / LAYERS


def row_of(requests: int, drafts: int, states_dtype: torch.dtype) -> dict[str, Any]:
    """Times of one size."""
    window, device, of = drafts + 1, torch.device("cuda"), torch.bfloat16
    tokens, width = requests * window, (2 * KEY_HEADS + VALUE_HEADS) * DIM
    on: Any = {"device": device, "dtype": of}
    mixed = torch.randn(LAYERS, tokens, width, **on)
    a, b = torch.randn(2, LAYERS, tokens, VALUE_HEADS, **on)
    decay = torch.rand(LAYERS, VALUE_HEADS, device=device).log() - 2
    bias = torch.zeros(LAYERS, VALUE_HEADS, **on)
    shape = (requests + 1, VALUE_HEADS, DIM, DIM)
    states = [torch.randn(shape, device=device).to(states_dtype) for _ in range(LAYERS)]
    of_requests: Any = {"device": device, "dtype": torch.int32}
    slots = torch.arange(1, requests + 1, **of_requests)
    table = slots[:, None].repeat(1, window).contiguous()
    ones = torch.ones(requests, **of_requests)
    starts = torch.arange(0, tokens + 1, window, **of_requests)
    output = torch.empty(tokens, VALUE_HEADS, DIM, **on)
    norm = GatedNorm(torch.randn_like(output), torch.ones(DIM, **on), 1e-6)
    inputs = [
        WindowInputs(mixed[i], a[i], b[i], decay[i], bias[i], states[i], table, ones, starts)
        for i in range(LAYERS)
    ]
    kinds: Any = {
        "key_heads": KEY_HEADS,
        "value_heads": VALUE_HEADS,
        "key_dim": DIM,
        "value_dim": DIM,
    }
    plain = allocate_records((LAYERS, requests, window), **kinds, **on)
    ringed = allocate_records((LAYERS, requests + 1, RECORD_ROWS), **kinds, **on)
    for part in ringed:
        part.normal_(0, 0.02)
    ringed.g.copy_(-ringed.g.abs())
    cursors = torch.zeros(requests + 1, 2, **of_requests)
    rings = RecordRings(slots, cursors, window)

    def verify(records: Any, given: RecordRings | None) -> None:
        for i in range(LAYERS):
            verify_window_triton(
                inputs[i], output, records.layer(i), scale=DIM**-0.5, norm=norm, rings=given
            )

    counts = torch.full((requests,), ACCEPTED, **of_requests)
    commit = StateCommit(states, [0] * LAYERS, [table], plain)
    row: dict[str, Any] = {"states": str(states_dtype)[6:], "requests": requests}
    row |= {"drafts": drafts, "verify_us": us_a_layer(partial(verify, plain, None))}
    row["commit_us"] = us_a_layer(lambda: commit(ones, counts))
    for live in (0, 5, FULL):
        cursors[1:, 0] = live
        row[f"ring_verify_{live}_live_us"] = us_a_layer(partial(verify, ringed, rings))
    commit_rings = StateCommit(states, [0] * LAYERS, [table], ringed, rings)
    for share in (0.0, 0.2, 1.0):
        cursors[1:, 1] = 0
        cursors[1 : 1 + (max(1, round(requests * share)) if share else 0), 1] = FULL
        row[f"ring_commit_{share:.0%}_full_us"] = us_a_layer(
            lambda: commit_rings(ones, counts, window)
        )
    return row


def main() -> None:
    """Time all sizes; the table is written after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    rows = []
    for requests, drafts in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(row_of(requests, drafts, dtype))
            table = pd.DataFrame(rows).rename(columns=lambda name: name.replace("%", ""))
            table.to_csv(output, index=False, float_format="%.4g")
            print(table.tail(1).to_string(index=False, header=len(rows) == 1), flush=True)


if __name__ == "__main__":
    main()
