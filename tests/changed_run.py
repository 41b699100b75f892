"""Made-up runs that differ from `make_run` in a known way, for tests of `compare`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from synthetic_run import once_a_run, summarised

from nwor_bench.analysis.cell_data import gather_cells
from nwor_bench.analysis.stored_run import StoredRun
from nwor_bench.records.store import RunData

Factors = Mapping[tuple[str, str], float]


def slowed(
    run: RunData, factors: Factors, *, machine: float = 1.0, noise: float = 0.002, seed: int = 1
) -> RunData:
    """The run again with other noise, all of it `machine` times as slow, cells by their factor.

    A factor's key is (NWOR mode, SCV mode); it leaves the A/A arm alone. The noise is one factor
    a batch, in the windows and the latency alike, of 1 +- `noise`.
    """
    rng = Random(seed)
    drawn: dict[Any, float] = {}

    def factor(record: Any) -> float:
        place = (record.cell, record.batch)
        chance = drawn.setdefault(place, rng.uniform(1 - noise, 1 + noise))
        own = 1.0 if record.arm else factors.get((record.nwor_mode, record.scv_mode), 1.0)
        return machine * own * chance

    return replace(
        run,
        batches=tuple(replace(b, latency_ms=b.latency_ms * factor(b)) for b in run.batches),
        windows=tuple(replace(w, wall_ms=(w.wall_ms or 0) * factor(w)) for w in run.windows),
    )


def other_prompts(run: RunData) -> RunData:
    """The run as if it had drawn other prompts."""
    batches = tuple(replace(b, prompt_digest=f"other {b.prompt_digest}") for b in run.batches)
    return replace(run, batches=batches)


@once_a_run
def stored(run: RunData) -> StoredRun:
    """The run as `load_stored` gives it, without a folder; made once for each run."""
    return StoredRun(
        folder=Path("somewhere"),
        header=run.header,
        cells={result.cell: result for result in summarised(run)},
        data={data.cell: data for data in gather_cells(run)},
        warnings=(),
    )
