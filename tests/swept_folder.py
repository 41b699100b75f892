"""A made-up sweep folder, for tests of what its report says. Nothing was measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from synthetic_run import change_batches, save_run, with_header

from nwor_bench.records.store import RunData
from nwor_bench.records.types import RequestTimes


def at_place(run: RunData, **axes: Any) -> RunData:
    """The run with these values of its axes, and request metrics."""
    run = with_header(run, "scenario", requests=axes["requests"])
    run = with_header(run, "spec", dtype=axes["dtype"])
    scale = 1 + axes["requests"] / 16
    ttft = tuple(20 * scale + place for place in range(2))
    times = RequestTimes(ttft, (5.0 * scale, 5.1 * scale))
    run = change_batches(run, lambda batch: True, request_times=times)
    batches = tuple(
        replace(b, tokens_per_s=b.tokens_per_s * axes["requests"] / scale) for b in run.batches
    )
    return replace(run, batches=batches)


def save_sweep(
    folder: Path, runs: Sequence[tuple[Mapping[str, Any], RunData | None]], name: str = "grid"
) -> Path:
    """A sweep folder of runs at these places; None for one that failed before it started."""
    folder.mkdir()
    entries = []
    for number, (axes, run) in enumerate(runs, start=1):
        own = {"pair": "toy", "scenario": "short", "draft_tokens": 4, "temperature": 0.0,
               "cache_dtype": None, "acceptance_length": None, **axes}  # fmt: skip
        entry = {"number": number, "folder": f"{number:02d}-toy", "engine": 1, **own,
                 "status": "done", "exit_code": 0, "error": None}  # fmt: skip
        if run is None:
            entry |= {"status": "failed", "exit_code": 1, "error": "vLLM did not start: no luck"}
        else:
            save_run(at_place(run, **axes), folder / entry["folder"])
        entries.append(entry)
    content = {"format_version": 1, "name": name, "sweep": {}, "engines": 1,
               "started_at": "2031-01-02T03:04:05+00:00", "finished_at": None,
               "runs": entries}  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder
