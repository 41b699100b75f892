"""The section on bytes: what the byte model predicts, beside what the GPU's counters measured."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean

from nwor_bench.analysis.aggregate import REFERENCE as BASELINE
from nwor_bench.analysis.dram.counters import CellBytes, cell_bytes
from nwor_bench.analysis.dram.prediction import strategy_of
from nwor_bench.models.byte_model import CACHE_BITS
from nwor_bench.models.config_reader import MODEL_BITS
from nwor_bench.models.strategies import BY_REFERENCE, COPY_IN_L2, COPY_SPILLED, DIRECT, Strategy
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.header import PairFacts, RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Phase
from nwor_bench.report.document import Block, Code, Figure, Paragraph, Section, table
from nwor_bench.report.plots import axis, categories, colour, layout
from nwor_bench.report.sections.states import state_blocks
from nwor_bench.report.text import NOT_MEASURED, count, decimal, label, percent, size

TITLE = "Bytes: predicted beside measured"

WRITE = "dram_write_bytes"

_SHOWN = (DIRECT, BY_REFERENCE, COPY_SPILLED, COPY_IN_L2)

_COUNTED = (
    "Counted: token counts times the bytes of one token's K and V over all target layers{each}. "
    "Avoided are the bytes of rejected draft tokens, which were never written to the cache. "
    "Staging itself moves bytes that are not counted here: tokens saved are not bytes saved."
)
_NO_DRAM = (
    "DRAM traffic was not measured in this run, so nothing stands beside the prediction and no "
    "figure is drawn."
)
_SHARE = "The share of a whole step's bytes needs the model's shape; this predicts it:"


@dataclass(frozen=True)
class _Rows:
    """Bytes that one token's K/V takes over all target layers, and a window's mean tokens."""

    in_cache: float
    as_activations: float | None
    drafts: float
    accepted: float

    def moved(self, strategy: Strategy, *, reads: bool) -> float | None:
        """DRAM bytes of a window in one direction, by the byte model (see `strategies`)."""
        total = 0.0
        for move in strategy.moves:
            if move.reads is reads:
                row = self.as_activations if move.as_activations else self.in_cache
                if row is None:
                    return None
                total += move.rows(1, 0) * self.drafts * row + move.rows(0, 1) * self.accepted * row
        return total


def bytes_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """Two tables: predicted DRAM bytes of a window by way of staging, and counted cache bytes."""
    engine = run.header.engine or EngineStatus()
    rows = _rows(run.header, cells)
    blocks: list[Block] = []
    if rows is None:
        blocks.append(
            Paragraph("Nothing can be predicted: the bytes of a token's K/V or its windows are "
                      "not known.")
        )  # fmt: skip
    else:
        blocks += _predicted(rows)
        command = _plan_command(run, rows)
        if command is not None:
            blocks += [Paragraph(_SHARE), Code(command)]
    blocks += state_blocks(run.header, cells)
    measured = _figure(cell_bytes(run), strategy_of(run.header).staging)
    blocks.append(measured or Paragraph(_NO_DRAM))
    per_token = engine.bytes_per_token
    each = "" if per_token is None else f" ({count(per_token)} bytes)"
    counted = table(
        ["Cell", "Staged", "Committed", "Avoided cache writes"],
        [
            [label(cell), size(cell.bytes_staged), size(cell.bytes_committed),
             size(cell.bytes_avoided)]
            for cell in cells
        ],
        caption="Counted cache bytes of all timed windows",
    )  # fmt: skip
    return Section(TITLE, (*blocks, counted, Paragraph(_COUNTED.format(each=each))), folded=True)


def _figure(cells: Sequence[CellBytes], how: str) -> Figure | None:
    """Written DRAM bytes less those of off x off, measured and predicted; None if not measured."""
    found = [(cell, cell.differences[WRITE]) for cell in cells if WRITE in cell.differences]
    if not found:
        return None
    labels = [cell.cell.label for cell, _ in found]
    reach = [
        None if amount.high is None else (amount.high - amount.mean) / 1e6 for _, amount in found
    ]
    measured = {
        "type": "scatter", "mode": "markers", "name": "measured", "y": labels,
        "x": [amount.mean / 1e6 for _, amount in found],
        "error_x": {"type": "data", "array": reach, "color": colour("faster"), "width": 5},
        "marker": {"size": 10, "color": colour("faster")},
    }  # fmt: skip
    predicted = {
        "type": "scatter", "mode": "markers", "name": "predicted", "y": labels,
        "x": [cell.predicted[WRITE] / 1e6 if WRITE in cell.predicted else None
              for cell, _ in found],
        "marker": {"symbol": "diamond-open", "size": 12, "color": colour("slower")},
    }  # fmt: skip
    in_words = "; ".join(
        f"{cell.cell.label} {decimal(amount.mean / 1e6, 2)}" for cell, amount in found
    )
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0, "layer": "below",
            "line": {"color": colour("text"), "width": 1.5}}  # fmt: skip
    return Figure(
        name="dram-bytes",
        caption=(
            "MB that a window wrote to DRAM less those of off x off, with 95 % intervals, and what "
            f"the byte model predicts for staging {how}. Left of 0: fewer bytes."
        ),
        alternative=f"DRAM bytes written a window less off x off, MB, measured: {in_words}.",
        data=(measured, predicted),
        layout=layout(
            axis("MB a window, less off x off"),
            categories([cell.cell.label for cell, _ in found]),
            shapes=[line],
            showlegend=True,
        ),
        height=34 * len(found) + 100,
    )


def _predicted(rows: _Rows) -> list[Block]:
    lines = []
    for strategy in _SHOWN:
        read, written = (rows.moved(strategy, reads=reads) for reads in (True, False))
        lines.append([strategy.label, _size(read), _size(written), _saved(strategy, rows)])
    share = percent(rows.accepted / rows.drafts)
    note = (
        f"Predicted for this run's mean window: {decimal(rows.drafts)} drafts, of which "
        f"{decimal(rows.accepted)} ({share}) are accepted. Drafts' K/V alone; weights and context "
        "are read in every case. A copy loses unless it stays in the L2 cache; by reference saves "
        "below half acceptance, in a cache of the activations' type."
    )
    caption = "DRAM bytes of a window's draft tokens, predicted by the byte model"
    heads = ["Drafts' K/V", "Read", "Written", "Saved"]
    return [table(heads, lines, caption=caption), Paragraph(note)]


def _saved(strategy: Strategy, rows: _Rows) -> str:
    """Bytes less than direct; a minus where it moves more."""
    if strategy is DIRECT:
        return NOT_MEASURED
    totals = []
    for each in (DIRECT, strategy):
        both = (rows.moved(each, reads=True), rows.moved(each, reads=False))
        if None in both:
            return NOT_MEASURED
        totals.append(sum(part or 0.0 for part in both))
    saved = totals[0] - totals[1]
    return f"-{_size(-saved)}" if round(saved) < 0 else _size(saved)


def _size(amount: float | None) -> str:
    return size(None if amount is None else round(amount))


def _rows(header: RunHeader, cells: Sequence[CellResult]) -> _Rows | None:
    """From the counts of off x off, whose windows all cells run; None where they are missing."""
    baseline = next((cell for cell in cells if cell.verdict == BASELINE), None)
    engine = header.engine or EngineStatus()
    in_cache = engine.bytes_per_token
    if baseline is None or not in_cache or not baseline.windows or not baseline.draft_tokens:
        return None
    dtype = str(header.data_type)
    cache = engine.kv_cache_dtype or "auto"
    bits, cache_bits = MODEL_BITS.get(dtype), CACHE_BITS.get(dtype if cache == "auto" else cache)
    return _Rows(
        in_cache=in_cache,
        as_activations=in_cache * bits / cache_bits if bits and cache_bits else None,
        drafts=baseline.draft_tokens / baseline.windows,
        accepted=(baseline.accepted_tokens or 0) / baseline.windows,
    )


def _plan_command(run: RunData, rows: _Rows) -> str | None:
    """`nwor-bench plan` for this run's model, load and data types; None if it cannot say them."""
    header = run.header
    model, types = plan_model(header), _plan_types(header)
    timed = [batch for batch in run.batches if batch.phase == Phase.TIMED]
    requests = sum(batch.requests for batch in timed)
    if model is None or types is None or not requests:
        return None
    own = {batch.batch for batch in timed if batch.cell.is_baseline}
    active = [w.num_reqs for w in run.windows if w.cell.is_baseline and w.batch in own]
    at_once = fmean(active) if active else requests / len(timed)
    # A request's context grows from its prompt to all of its tokens: halfway on average.
    tokens = sum(batch.prompt_tokens + batch.output_tokens / 2 for batch in timed)
    load = {
        "--requests": max(1, round(at_once)),
        "--context": round(tokens / requests),
        "--draft-tokens": max(1, round(rows.drafts / at_once)),
        "--acceptance": f"{rows.accepted / rows.drafts:.2f}",
        "--tensor-parallel-size": (header.spec or {}).get("tensor_parallel_size"),
        **types,
    }
    flags = [part for flag, value in load.items() if value for part in (flag, str(value))]
    return shlex.join(["nwor-bench", "plan", *model, *flags])


def plan_model(header: RunHeader) -> list[str] | None:
    """The flag that names the target; None for a hub model, which `plan` does not read."""
    pair, choice = header.pair or PairFacts(), header.choice or {}
    if choice.get("target_model") is None and (choice.get("pair") or header.choice):
        return ["--pair", str(choice.get("pair") or pair.name)]
    if pair.target is not None and PurePath(pair.target).is_absolute():
        return ["--target-model", pair.target]
    return None


def _plan_types(header: RunHeader) -> dict[str, str] | None:
    """The cache's data type; None where model or weights ran in another type than config.json's,
    which `plan` goes by."""
    spec, pair, engine = header.spec or {}, header.pair or PairFacts(), header.engine
    asked = spec.get("dtype")
    quantised = "quantization" in (spec.get("engine_args") or {})
    if asked not in (None, "auto", pair.dtype) or quantised:
        return None
    cache = (engine or EngineStatus()).kv_cache_dtype or "auto"
    if cache == "auto":
        return {}
    return {"--cache-dtype": cache} if cache in CACHE_BITS else None
