"""Made-up runs in which cells are interleaved, with planted effects. Not measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from random import Random

from report_runs import gpu_run
from synthetic_run import AA_CELL, CELLS, LAYERS, make_run

from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Cell, NworMode, Phase, ScvMode, WindowRecord
from nwor_bench.records.window_order import compared_pairs, places_of

OFF = CELLS[0]
CONTROL = Cell("toy", NworMode.CONTROL, ScvMode.OFF)
STAGE_GRAPH = Cell("toy", NworMode.STAGE, ScvMode.GRAPH)
INTERLEAVED_CELLS = (*CELLS, AA_CELL, CONTROL)
REQUESTS, DRAFTS = 2, 8
FIRST_BATCH = 5000


@dataclass(frozen=True)
class Planted:
    """What is true of a run."""

    effects: Mapping[str, float]
    """Window time over that of off x off, by the cell's label; 1 if absent."""

    noise: float = 0.004
    """Scatter of a window's log time."""

    carry_over: float = 0.0
    """Share by which the first window that counts takes longer, in every cell but off x off."""

    host: float = 1.0
    """Power of the effects on the host's clock: 1 as on the device's, 0 none."""

    host_noise: float = 0.004
    """Scatter that the host's clock has beside the device's; 0 if the run is host-bound."""

    clocks: Sequence[float] = (1980.0,)
    """SM clocks of the batches, in place."""

    per_100_mhz: float = 0.0
    """Change of every effect's logarithm for 100 MHz more than the first clock."""

    work_noise: float | None = None
    """Scatter of the GPU's own work, which has all of the effect; None: not timed."""

    long_windows: float = 0.0
    """Share of windows, in every cell but off x off, that take twice the time."""


def interleaved_run(
    planted: Planted,
    batches: int = 12,
    groups: int = 64,
    *,
    whole: Mapping[str, float] | None = None,
    device: bool = True,
    seed: int = 5,
) -> RunData:
    """Three blocks of whole batches and `batches` interleaved ones.

    Args:
        planted: the truth of the windows in place.
        batches: interleaved batches.
        groups: of each batch.
        whole: true ratios of whole batches of stage cells by SCV mode, and of "control".
        device: False for a run without a device's clock.
        seed: of the noise.
    """
    key = repr((planted, batches, groups, whole, device, seed))
    if key not in _MADE:
        _MADE[key] = _make(planted, batches, groups, whole or {}, device, seed)
    return _MADE[key]


_MADE: dict[str, RunData] = {}
"""Runs by what they were asked for, each made once."""

_WINDOWS: dict[str, list[list[WindowRecord]]] = {}
"""The windows of a run's interleaved batches, which runs with other whole batches have too."""


def _make(
    planted: Planted, batches: int, groups: int, whole: Mapping[str, float], device: bool, seed: int
) -> RunData:
    run = gpu_run(effects=whole, noise=0.003, blocks=3, probed=False)
    run = _with_control(run, whole.get("control", 1.0))
    clocks = [planted.clocks[place % len(planted.clocks)] for place in range(batches)]
    key = repr((planted, batches, groups, device, seed))
    if key not in _WINDOWS:
        rng = Random(seed)
        _WINDOWS[key] = [
            list(_batch_windows(place, groups, planted, clock, rng, device))
            for place, clock in enumerate(clocks)
        ]
    records, windows, events = list(run.batches), list(run.windows), list(run.events)
    for place, (clock, own) in enumerate(zip(clocks, _WINDOWS[key], strict=True)):
        records.append(_batch(run.batches, place, own, clock))
        windows += own
        events.append(_event(place, own))
    return replace(run, batches=tuple(records), windows=tuple(windows), events=tuple(events))


def group_windows(
    pair: tuple[Cell, Cell], run_length: int, first: Cell | None = None, **changes: object
) -> list[WindowRecord]:
    """One quiet group of a batch: every window takes 10 ms."""
    a, b = pair if first is None or first == pair[0] else pair[::-1]
    return [
        _changed(
            _window(cell, 0),
            **{"window": number, "group": 0, "run": run, "position": position},
            **{"run_length": run_length, **changes},
        )
        for number, (run, cell, position) in enumerate(
            (run, cell, position)
            for run, cell in enumerate((a, b, b, a))
            for position in range(run_length)
        )
    ]


def _batch_windows(
    place: int, groups: int, planted: Planted, clock: float, rng: Random, device: bool
) -> Iterator[WindowRecord]:
    like = {cell: _window(cell, place) for cell in INTERLEAVED_CELLS}
    for window in range(2):  # after the prefill
        yield _changed(like[OFF], window=window, wall_ms=None, device_ms=None)
    for place in places_of(compared_pairs(INTERLEAVED_CELLS), str(rng.random())):
        if place.group == groups:
            return
        cell = INTERLEAVED_CELLS[place.cell]
        ours, hosts = _times(cell, planted, clock, place.position, rng)
        window += 1
        yield _changed(
            like[cell],
            window=window,
            wall_ms=hosts,
            device_ms=ours if device else None,
            **_phases(cell, planted, rng),
            group=place.group,
            run=place.run,
            run_length=place.run_length,
            position=place.position,
        )


def _phases(cell: Cell, planted: Planted, rng: Random) -> dict[str, float]:
    """The GPU's work of a window in off x off: 7 ms of forward and 1 of sampling."""
    if planted.work_noise is None:
        return {}
    scatter = exp(rng.gauss(0, planted.work_noise))
    whole = 8.0 * planted.effects.get(cell.label, 1.0) * scatter
    if cell.nwor_mode is not NworMode.STAGE:
        return {"forward_ms": whole - 1.0, "sample_ms": 1.0}
    return {"forward_ms": whole - 1.1, "sample_ms": 1.0, "commit_ms": 0.1}


def _times(
    cell: Cell, planted: Planted, clock: float, position: int, rng: Random
) -> tuple[float, float]:
    """One window on the device's clock and on the host's."""
    ratio = planted.effects.get(cell.label, 1.0)
    noise = exp(rng.gauss(0, planted.noise))
    if not cell.is_baseline:
        ratio *= exp(planted.per_100_mhz * (clock - planted.clocks[0]) / 100)
        if position == 1:
            ratio *= 1 + planted.carry_over
        if rng.random() < planted.long_windows:
            ratio *= 2
    base = 10 * planted.clocks[0] / clock * noise
    return base * ratio, base * ratio**planted.host * exp(rng.gauss(0, planted.host_noise))


def _changed(like: WindowRecord, **changes: object) -> WindowRecord:
    """`replace`, which takes ten times as long for a frozen class of so many fields."""
    made = object.__new__(WindowRecord)
    vars(made).update(vars(like), **changes)
    return made


def _window(cell: Cell, place: int) -> WindowRecord:
    """A quiet window of the cell, in no group."""
    staged = DRAFTS if cell.nwor_mode is NworMode.STAGE else 0
    accepted = 5
    like = next(w for w in make_run(blocks=1).windows if w.cell.is_baseline)
    return replace(
        like,
        **{**cell.names, "pair": like.pair},
        block=place + 1,
        batch=FIRST_BATCH + place,
        window=0,
        num_reqs=REQUESTS,
        draft_tokens=DRAFTS,
        accepted_tokens=accepted,
        staged_tokens=staged,
        committed_tokens=accepted if staged else 0,
        rejected_tokens=staged - accepted if staged else 0,
        stage_operations=staged * LAYERS,
        accepted_per_position=(2, 2, 1, 0),
        drafts_per_position=(2, 2, 2, 2),
        scv_path="graph" if cell.scv_mode is not ScvMode.OFF else "host",
        control_tokens=DRAFTS if cell.nwor_mode is NworMode.CONTROL else 0,
        wall_ms=10.0,
        device_ms=10.0,
        forward_ms=None,
        sample_ms=None,
    )


def _batch(
    whole: Sequence[BatchRecord], place: int, windows: Sequence[WindowRecord], clock: float
) -> BatchRecord:
    like = next(b for b in whole if b.cell.is_baseline and b.phase == Phase.TIMED)
    accepted = sum(w.accepted_tokens for w in windows)
    drafts = sum(w.draft_tokens for w in windows)
    latency = sum(w.wall_ms or 0.0 for w in windows)
    return replace(
        like,
        phase=Phase.INTERLEAVED,
        block=place + 1,
        batch=FIRST_BATCH + place,
        order=0,
        latency_ms=latency,
        windows=len(windows),
        draft_tokens=drafts,
        accepted_tokens=accepted,
        staged_tokens=sum(w.staged_tokens for w in windows),
        committed_tokens=sum(w.committed_tokens for w in windows),
        vllm_num_drafts=REQUESTS * len(windows),
        vllm_draft_tokens=drafts,
        vllm_accepted_tokens=accepted,
        vllm_accepted_per_position=tuple(
            sum(w.accepted_per_position[j] for w in windows) for j in range(4)
        ),
        prompt_digest=f"interleaved-{place}",
        fallbacks={},
        scv_counters={},
        conditions={
            "gpu_sm_clock_mhz": clock,
            "gpu_throttled_ms": latency / 4 if clock < 1900 else 0.0,
        },
    )


def _event(place: int, windows: Sequence[WindowRecord]) -> dict[str, object]:
    cells: dict[str, object] = {}
    for cell in dict.fromkeys(window.cell for window in windows):
        count = sum(window.cell == cell for window in windows)
        hits = count if cell.scv_mode is not ScvMode.OFF else 0
        counters = {"scv_device_validations": hits, "scv_graph_hits": hits}
        cells[cell.label] = {"scv_counters": counters, "scv_fallbacks": {}}
    return {
        "event": "interleaved",
        "batch": FIRST_BATCH + place,
        "block": place + 1,
        "cells": cells,
    }


def _with_control(run: RunData, ratio: float) -> RunData:
    """The run with control x off in whole batches: those of off x off, with noise of its own."""
    rng = Random(3)
    factors = [ratio * exp(rng.gauss(0, 0.003)) for _ in range(10)]
    batches = [
        replace(
            b,
            nwor_mode=NworMode.CONTROL,
            batch=900 + b.block,
            order=b.order + 50,
            parity=b.parity and "exact",
            latency_ms=b.latency_ms * factors[b.block],
        )
        for b in run.batches
        if b.cell.is_baseline
    ]
    windows = [
        replace(
            w,
            nwor_mode="control",
            batch=900 + w.block,
            control_tokens=w.draft_tokens,
            wall_ms=(w.wall_ms or 0.0) * factors[w.block],
        )
        for w in run.windows
        if w.cell.is_baseline
    ]
    return replace(run, batches=(*run.batches, *batches), windows=(*run.windows, *windows))
