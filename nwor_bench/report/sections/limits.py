"""What a run's numbers do not show: read off the run itself, so that it cannot be forgotten."""

from collections.abc import Iterator, Sequence

from nwor_bench.analysis.aggregate import REFERENCE, noise_floor
from nwor_bench.analysis.interleaved.agreement import WINDOWS
from nwor_bench.analysis.statistics import MIN_BLOCKS
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, NworMode, Phase, ScvMode
from nwor_bench.report.sections.verdicts import on_cpu
from nwor_bench.report.text import joined, label, plural

FEW_BLOCKS = 10
"""Below this an interval rests on too little to be tight, and the report says so."""

CPU_LIMIT = (
    "These timings measure the harness, not NWOR: on a CPU both modes run on a reference "
    "attention backend of nwor-bench's own, because the stock CPU cache cannot be read in part. "
    "Tokens, acceptance and counts hold; speed does not carry over to a GPU in either direction."
)


OTHER_ATTENTION = (
    "Mode stage changes two things: drafts are not written, and attention is nwor-bench's kernel "
    "instead of the backend's, since it must read them from elsewhere. A ratio holds both. How the "
    "two attention kernels compare alone: nwor-bench kernels --kernels verify_attention."
)

SPLIT = (
    "Mode stage changes two things: drafts are not written, and attention is nwor-bench's kernel. "
    "A ratio holds both. Windows in turn tell them apart for the cell that alternated with control "
    "x off; of other staging cells the total alone is known."
)


def limits(run: RunData, cells: Sequence[CellResult]) -> tuple[str, ...]:
    """One sentence or two for each thing that a reader might wrongly conclude."""
    return (*_device(run, cells), *_time(run, cells), *_work(run, cells), *_always(run))


def _device(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    if not on_cpu(run.header):
        if any(cell.nwor_mode == NworMode.STAGE and cell.ratio_to_off for cell in cells):
            yield SPLIT if _has_control(cells) else OTHER_ATTENTION
        return
    yield CPU_LIMIT
    if any(cell.scv_mode != ScvMode.OFF for cell in cells):
        yield (
            "SCV graphs cannot be captured without CUDA: graph and adaptive ran the device path "
            "eagerly, and nothing here says what a graph would save."
        )


def _has_control(cells: Sequence[CellResult]) -> bool:
    return any(cell.nwor_mode == NworMode.CONTROL and cell.interleaved == WINDOWS for cell in cells)


def _time(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    blocks = len({batch.block for batch in run.batches if batch.phase == Phase.TIMED})
    if any(cell.interleaved == WINDOWS for cell in cells):
        yield (
            "Ratios of windows in turn leave out the first window after each switch; a mode that "
            "slows down later windows of another one would show as carry-over, in cells in which "
            "that could be tested."
        )
        if all(cell.ratio_batches_low is None for cell in cells):
            yield (
                f"Whole batches ran in {plural(blocks, 'block')}, and to check the windows' ratios "
                f"takes {MIN_BLOCKS}."
            )
    elif blocks < MIN_BLOCKS:
        yield (
            f"{plural(blocks, 'timed block')}: too few for an interval (it needs {MIN_BLOCKS}), so "
            "no cell can be called faster or slower."
        )
    elif blocks < FEW_BLOCKS:
        yield (
            f"{blocks} timed blocks are few, so the intervals are wide. More blocks narrow them."
        )
    if noise_floor(cells) is None:
        yield (
            "The noise floor (off x off against itself) was not measured, so a difference of a "
            "per cent or so may be drift of the machine."
        )
    yield "A verdict holds for this pair, these prompts and this machine; other loads may differ."
    if any(cell.latency_ms_p95 is not None and cell.batches < 20 for cell in cells):
        yield "The 95th percentile of fewer than 20 batches is close to their maximum, no more."


def _work(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    baseline = next((cell for cell in cells if cell.verdict == REFERENCE), None)
    if baseline is not None:
        unequal = [
            label(cell)
            for cell in cells
            if cell.ratio_to_off is not None and cell.output_tokens != baseline.output_tokens
        ]
        if unequal:
            yield (
                f"Not the same number of output tokens as off x off: {joined(unequal)}. Their "
                "batch latencies and tokens/s compare unequal work; windows are matched one by one."
            )
    if any(batch.phase == Phase.TIMED and batch.temperature > 0 for batch in run.batches):
        yield (
            "Timed batches were sampled at a temperature above 0; parity was checked greedily "
            "and says nothing of the sampled text."
        )


def _always(run: RunData) -> Iterator[str]:
    yield (
        "Equal tokens were shown for the gate's prompts and this data type. That is strong "
        "evidence of the same computation, not a proof for every input."
    )
    counted = any(batch.phase == Phase.COUNTERS for batch in run.batches)
    dram = "" if counted else " No DRAM traffic was measured in this run."
    yield (
        "Tokens saved are not bytes saved, and bytes saved are not time saved: what is staged or "
        f"avoided is computed from token counts, and staging moves bytes too.{dram}"
    )
