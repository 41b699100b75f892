"""Parts of the difference in DRAM writes between mode stage and stock vLLM. Pure.

Computed from shapes and the few measured constants below; `page.py` also shows the unexplained
rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from partials import busy_programs, partial_bytes

from nwor_bench.analysis.invariants import full_windows, windows_by_batch
from nwor_bench.models.shape import ModelShape
from nwor_bench.records.store import RunData
from nwor_bench.records.types import SETTLING, NworMode, Phase, WindowRecord
from nwor_kernels.verify_attention.tuning import (
    LaunchShape,
    Tuning,
    launch_shape,
    programs_on,
    row_tiling,
)

PROCESSORS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132}
"""Multiprocessors, from which the attention kernel's grid follows."""

PROMPT_TOKENS = 1024
"""Of scenario ctx-1k, to which a window's context adds what has been generated."""

MIDDLE = 12
"""Windows of a batch before the one in its middle."""

FLASH_SPLITS = {(8, 4): 2, (64, 8): 1}
"""Parts into which FlashAttention 3 splits contexts, by requests and drafts.

What its scheduler says on an H200 (`sweeps/studies/dram-kernels`), in full graphs and eagerly.
"""

MOST_SPLITS = "flash_attn_max_num_splits_for_cuda_graph"
"""vLLM's setting, part of its attention_config."""

SPILLED = {16: 0, 32: 12}
"""Bytes of registers that a thread of ours spills, by query rows of a tile.

Counted in the SASS that Triton 3.6 makes for sm_90 (bf16, head dim 128, default tuning): three
stores to local memory at 32 rows, before the loop over the context; none at 16.
"""

JUMP = 20e6
"""A window that writes so many bytes above its cell's median left partial results.

Other windows of a cell differ by a few MB, and one layer's contexts are all cut alike, or none is.
"""

SIMULATIONS = 20
"""Times that a run's batches are simulated."""


@dataclass(frozen=True)
class Parts:
    """Bytes a window that mode stage writes more (less: negative) than stock vLLM; None: unknown.

    Attributes:
        kv: the drafts' K/V, by the byte model of `nwor-bench plan`.
        splits: stock FlashAttention's own partial results, which ours has none of.
        log_sum_exp: what FlashAttention writes beside each output, wanted or not.
        spills: registers of our kernel, spilled by each of its threads that has work.
        cut: partial results of windows whose contexts were cut, over all counted windows.
        made: partial results made in a window of equal lengths; dropped from L2, so no part.
        windows, cut_windows: counted ones, and those among them that were cut.
        simulated_cuts: how many the kernel's rule cuts, see `simulated_cuts`.
    """

    kv: float
    splits: float | None
    log_sum_exp: float
    spills: float | None
    cut: float
    made: float
    windows: int
    cut_windows: int
    simulated_cuts: float

    def explained(self) -> float | None:
        """Their sum."""
        if self.splits is None or self.spills is None:
            return None
        return self.kv + self.splits + self.log_sum_exp + self.spills + self.cut


def parts_of(run: RunData, row: Mapping[str, Any], shape: ModelShape) -> Parts:
    """The parts for one cell in mode stage; `row` is its line of `csv_rows`."""
    requests, drafts = row["requests"], row["draft_tokens"]
    layers = len(shape.layers)
    launch = _launch(run, shape, drafts)
    window = drafts + 1
    by_reference = row["stage_by"] == "reference"
    gained = MIDDLE * (1 + row["accepted_tokens_mean"] / requests)
    lengths = [PROMPT_TOKENS + round(gained) + window] * requests
    staged = [window if by_reference else drafts] * requests
    query_rows = [window * shape.heads // shape.kv_heads] * requests
    of_launch = (shape.kv_heads, launch, launch.programs)
    made = partial_bytes(lengths, staged, query_rows, *of_launch)
    threads = busy_programs(lengths, staged, *of_launch) * 32 * launch.num_warps
    spilled, splits = SPILLED.get(launch.rows), _splits(run, requests, drafts)
    outputs = requests * window * shape.heads * layers
    counted = [window for batch in _stage_windows(run) for window in batch]
    writes = [window.dram_write_bytes or 0 for window in counted]
    jumps = [write - median(writes) for write in writes if write > median(writes) + JUMP]
    return Parts(
        kv=row["dram_write_bytes_minus_off_predicted"],
        splits=None if splits is None else 0.0 - split_bytes(outputs, shape, splits),
        log_sum_exp=-4.0 * outputs,
        spills=None if spilled is None else float(spilled * threads * layers),
        cut=sum(jumps) / len(writes),
        made=float(made * layers),
        windows=len(writes),
        cut_windows=len(jumps),
        simulated_cuts=0.0 if made else simulated_cuts(run, requests, by_reference, of_launch),
    )


def simulated_cuts(
    run: RunData, requests: int, by_reference: bool, of_launch: tuple[int, LaunchShape, int]
) -> float:
    """Counted windows of mode stage that leave partial results, on average over random batches.

    As many batches, as long and with the same acceptance by position as the run's; `of_launch`
    are `partial_bytes`'s last arguments, of a launch that makes none where lengths are equal.
    """
    batches = _stage_windows(run)
    flat = [window for batch in batches for window in batch]
    drafts = np.array([window.drafts_per_position for window in flat]).sum(axis=0)
    accepted = np.array([window.accepted_per_position for window in flat]).sum(axis=0) / drafts
    window, rng, cut = len(drafts) + 1, np.random.default_rng(0), 0
    staged = [window if by_reference else window - 1] * requests
    for _ in range(SIMULATIONS):
        for batch in batches:
            lengths = np.full(requests, PROMPT_TOKENS + window)
            for place in range(SETTLING + len(batch)):
                rows = [1] * requests  # whether there are any is all that is asked
                if place >= SETTLING and partial_bytes(lengths.tolist(), staged, rows, *of_launch):
                    cut += 1
                lengths += 1 + (rng.random((requests, 1)) < accepted).sum(axis=1)
    return cut / SIMULATIONS


def split_bytes(outputs: int, shape: ModelShape, splits: int) -> float:
    """What FlashAttention's splits leave: float32 output and log-sum-exp; one split, nothing."""
    return float(outputs * (shape.head_dim + 1) * 4 * splits) if splits > 1 else 0.0


def _splits(run: RunData, requests: int, drafts: int) -> int | None:
    """What FlashAttention does, or less where the run's engine allowed less; None: unknown."""
    settings = (run.header.spec.get("engine_args") or {}).get("attention_config") or {}
    own = FLASH_SPLITS.get((requests, drafts))
    return own if own is None else min(own, settings.get(MOST_SPLITS, own))


def _launch(run: RunData, shape: ModelShape, drafts: int) -> LaunchShape:
    """The launch as on the run's GPU."""
    window, ratio = drafts + 1, shape.heads // shape.kv_heads
    rows, _, dim = row_tiling(window, ratio, shape.head_dim)
    processors = PROCESSORS[str(run.header.environment.gpus[0].name)]
    tuning = Tuning(programs=programs_on(processors, rows, dim))
    return launch_shape(window, ratio, shape.head_dim, 2, torch.device("cpu"), tuning)


def _stage_windows(run: RunData) -> list[list[WindowRecord]]:
    """The counted windows of mode stage, by batch."""
    windows = windows_by_batch(run)
    found = []
    for batch in run.batches:
        if batch.phase == Phase.COUNTERS and batch.nwor_mode is NworMode.STAGE:
            full = [w for w in full_windows([batch], windows) if not w.uncounted_draft_tokens]
            found.append([w for w in full[SETTLING:] if w.dram_write_bytes is not None])
    return found
