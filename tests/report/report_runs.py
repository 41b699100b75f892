"""Synthetic runs whose answer is known, for tests of what a report says. Nothing was measured."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from synthetic_run import SLOWDOWN, change_batches, make_run, with_header, with_parts

from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import NworMode, WindowRecord

GPU_ENGINE = {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "auto", "runner": "V2"}


def gpu_run(
    effects: Mapping[str, float] | None = None,
    noise: float = 0.0,
    blocks: int = 12,
    probed: bool = True,
) -> RunData:
    """A run on a GPU with the A/A arm.

    `effects` are the true time ratios of the `stage` cells by SCV mode, all 1 by default; `noise`
    is the standard deviation of a batch's log window time on top of what `make_run` has.
    """
    return _gpu_run(tuple(sorted((effects or {}).items())), noise, blocks, probed)


@cache
def _gpu_run(
    of_each: tuple[tuple[str, float], ...], noise: float, blocks: int, probed: bool
) -> RunData:
    effects = dict(of_each)
    made = make_run(blocks=blocks, device="cuda", aa=True, windows=12)
    rng = Random(11)
    factors: dict[tuple[object, ...], float] = {}

    def rescaled(window: WindowRecord) -> WindowRecord:
        key = (window.nwor_mode, window.scv_mode, window.arm, window.block)
        factor = factors.setdefault(key, math.exp(rng.gauss(0, noise)))
        if window.nwor_mode == "stage":
            factor *= effects.get(window.scv_mode, 1.0) / SLOWDOWN[NworMode.STAGE]
        assert window.wall_ms is not None
        # Windows of one batch differ too, here by half a per cent.
        return replace(window, wall_ms=window.wall_ms * factor * rng.uniform(0.995, 1.005))

    windows = tuple(map(rescaled, made.windows))
    batches = tuple(
        replace(b, latency_ms=b.latency_ms * factor, tokens_per_s=b.tokens_per_s / factor)
        for b in made.batches
        for factor in [
            effects.get(b.scv_mode, 1.0) / SLOWDOWN[NworMode.STAGE]
            if b.nwor_mode == "stage"
            else 1.0
        ]
    )
    run = with_header(replace(made, batches=batches, windows=windows), "engine", **GPU_ENGINE)
    run = with_parts(run, warmup={"batches": 6, "lookback": 5, "not_steady": None})
    return with_probe(run) if probed else run


def with_probe(run: RunData) -> RunData:
    """The run with one probed batch a cell, a copy of its last timed one."""
    last = {batch.cell: batch for batch in run.batches if batch.phase == "timed"}
    probes = [
        replace(batch, phase="probe", batch=9000 + i) for i, batch in enumerate(last.values())
    ]
    windows = [
        replace(window, batch=probe.batch)
        for probe, batch in zip(probes, last.values(), strict=True)
        for window in run.windows
        if batch_key(window) == batch_key(batch)
    ]
    return replace(run, batches=(*run.batches, *probes), windows=(*run.windows, *windows))


@cache
def faster() -> RunData:
    """Staging takes 2 to 3 % less time."""
    return gpu_run({"off": 0.981, "graph": 0.972, "adaptive": 0.975})


@cache
def ambiguous() -> RunData:
    """Staging changes little on a noisy machine."""
    return gpu_run({"off": 1.004, "graph": 0.994, "adaptive": 0.998}, noise=0.03, blocks=8)


@cache
def slower() -> RunData:
    """Staging costs 5 %."""
    return gpu_run({"off": 1.06, "graph": 1.05, "adaptive": 1.055})


@cache
def invalid() -> RunData:
    """One mode, that would have been the fastest, changes the output."""
    return change_batches(
        faster(),
        lambda b: (b.nwor_mode, b.scv_mode, b.phase) == ("stage", "graph", "gate"),
        parity="INVALID",
        first_mismatch="request 1, output token 17: 4096 instead of 220",
    )


@cache
def ineffective(reason: str = "attention_sinks") -> RunData:
    """Staging was asked for, and no window was ever staged, for this reason."""
    run = gpu_run()
    idle = {"staged_tokens": 0, "committed_tokens": 0, "rejected_tokens": 0, "stage_operations": 0,
            "bytes_staged": None, "bytes_committed": None, "bytes_avoided": None,
            "fallback_reason": reason, "mask_ms": None, "commit_ms": None}  # fmt: skip
    windows = tuple(
        replace(w, **idle) if w.nwor_mode == "stage" else w  # type: ignore[arg-type]
        for w in run.windows
    )
    batches = tuple(
        replace(b, staged_tokens=0, committed_tokens=0, fallbacks={reason: b.windows})
        if b.nwor_mode == "stage"
        else b
        for b in run.batches
    )
    return replace(run, batches=batches, windows=windows)


RUNS = {
    "faster": faster,
    "ambiguous": ambiguous,
    "slower": slower,
    "same": gpu_run,
    "invalid": invalid,
    "ineffective": ineffective,
    "cpu": lambda: make_run(aa=True),
}


def with_counters(run: RunData, saved_bytes: int, blocks: int = 5) -> RunData:
    """The run with DRAM counted in a copy of its first timed blocks; `stage` writes less."""
    rng = Random(5)
    batches, windows = [], []
    for number, batch in enumerate(b for b in run.batches if b.phase == "timed"):
        if batch.block > blocks:
            continue
        counted = replace(batch, phase="counters", batch=20_000 + number)
        batches.append(counted)
        saved = saved_bytes if batch.nwor_mode == "stage" else 0
        windows += [
            replace(
                window,
                batch=counted.batch,
                dram_read_bytes=9_000_000 + rng.randrange(2_000),
                dram_write_bytes=200_000 - saved + rng.randrange(2_000),
            )
            for window in run.windows
            if batch_key(window) == batch_key(batch)
        ]
    return replace(run, batches=(*run.batches, *batches), windows=(*run.windows, *windows))


def spent_by_gate(measuring_s: float = 66.2, batch_s: float = 1.0, **spec: Any) -> RunData:
    """A run on a GPU of seven cells that its clock ended behind the gate."""
    run = make_run(blocks=0, device="cuda", aa=True)
    run = replace(
        run, batches=tuple(replace(batch, latency_ms=1e3 * batch_s) for batch in run.batches)
    )
    run = with_header(run, "spec", time_budget_s=60.0, **spec)
    return with_parts(
        run,
        stopped=f"--time-budget 60s: {measuring_s} s were spent",
        measuring_s=measuring_s,
        kv_gate={"seconds": 2.5, "gate_seconds": 61.4},
    )
