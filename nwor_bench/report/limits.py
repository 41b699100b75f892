"""Findings and limits of a run's numbers, and the glossary."""

from collections.abc import Iterator, Sequence

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.cell_data import REFERENCE
from nwor_bench.analysis.effects import WINDOWS
from nwor_bench.analysis.statistics import DEFAULT_MARGIN, MIN_BLOCKS, SIGNIFICANCE
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, NworMode, Phase, ScvMode
from nwor_bench.report.answer import on_cpu
from nwor_bench.report.document import Block, Bullets, Definitions, Paragraph, Section
from nwor_bench.report.text import NOT_MEASURED, joined, plural


def findings_section(analysis: Analysis) -> Section:
    """Each finding with its remedy, the most severe first; then the limits of any such run."""
    found = tuple((f"{f.severity.upper()}: {f.message}", f.remedy) for f in analysis.findings)
    first: Block = (
        Definitions(found) if found else Paragraph("Nothing was found that weakens the numbers.")
    )
    blocks = (
        first,
        Paragraph("What the numbers do not show:"),
        Bullets(limits(analysis.run, analysis.cells)),
    )
    return Section("Findings and limits", blocks, folded=True)


def limits(run: RunData, cells: Sequence[CellResult]) -> tuple[str, ...]:
    """A sentence or two for each thing that a reader might wrongly conclude from this run."""
    return (*_device(run, cells), *_time(run, cells), *_work(run, cells), *_always(run))


def _device(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    if on_cpu(run.header):
        if any(cell.scv_mode != ScvMode.OFF for cell in cells):
            yield (
                "SCV graphs need CUDA: graph and adaptive ran the device path eagerly, so this run "
                "does not show the gain of a graph."
            )
        return
    if not any(cell.nwor_mode == NworMode.STAGE and cell.ratio_to_off for cell in cells):
        return
    split = any(c.nwor_mode == NworMode.CONTROL and c.interleaved == WINDOWS for c in cells)
    yield (
        "Mode stage changes two things: drafts are not written, and attention is nwor-bench's "
        "kernel instead of the backend's. A ratio contains both effects. "
        + ("Interleaved windows separate them for the cell that alternated with control x off."
           if split else
           "To compare only the attention kernels: nwor-bench kernels --kernels verify_attention.")
    )  # fmt: skip


def _time(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    blocks = len({batch.block for batch in run.batches if batch.phase == Phase.TIMED})
    if any(cell.interleaved == WINDOWS for cell in cells):
        if all(cell.ratio_batches_low is None for cell in cells):
            yield (
                f"Whole batches ran in {plural(blocks, 'block')}; checking window ratios needs at "
                f"least {MIN_BLOCKS}."
            )
    elif blocks < MIN_BLOCKS:
        yield (
            f"{plural(blocks, 'timed block')}: too few for an interval, which needs {MIN_BLOCKS}, "
            "so no cell can be FASTER or SLOWER."
        )
    yield "A verdict is valid for this pair, machine and load; others may differ."
    if any(cell.latency_ms_p95 is not None and cell.batches < 20 for cell in cells):
        yield "The 95th percentile of fewer than 20 batches is close to their maximum."


def _work(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    baseline = next((cell for cell in cells if cell.verdict == REFERENCE), None)
    if baseline is not None:
        unequal = [
            cell.label
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
            "and does not apply to the sampled text."
        )


def _always(run: RunData) -> Iterator[str]:
    yield (
        "Equal tokens were shown for the gate's prompts and this data type. That is strong "
        "evidence of the same computation, not a proof for every input."
    )
    yield "Tokens saved are not bytes saved, and bytes saved are not time saved."


_MARGIN = f"{100 * DEFAULT_MARGIN:g} %"

ENTRIES = (
    ("Window", "One verification step of speculative decoding: the model checks the draft tokens "
     "of all running requests in one forward pass."),
    ("NWOR (off, stage)", "No-write-on-reject. off: every draft token's K/V is written to the "
     "cache, as in stock vLLM. stage: it is kept out of the cache until the token is accepted."),
    ("control", "Attention as in stage, direct writes as in off. Control over off is the effect "
     "of the attention kernel; stage over control that of not writing, with validation and "
     "commit."),
    ("SCV (off, graph, adaptive)", "Speculative cache validation: what decides which staged tokens "
     "were accepted. off: the host. graph: a kernel on the GPU, replayed as a CUDA graph. "
     "adaptive: the kernel launched eagerly until a graph pays. As a column: whether it ran as "
     "asked."),
    ("Cell, reference", "NWOR mode x SCV mode. All cells are compared with off x off, the "
     "reference."),
    ("A/A, noise floor", "A/A is off x off a second time, compared like any other cell: their "
     "difference is noise. The noise floor (noise band) is how far its interval reaches from 1."),
    ("Block", "One set of prompts on which every cell runs once, in random order."),
    ("Time over off x off [95 % interval]", "Geometric mean over blocks of the cell's mean window "
     "time divided by that of off x off on the same prompts, for windows of equal batch size and "
     "context. 0.98 is 2 % less time. The interval is Student's t on the blocks' log ratios, "
     "widened if they are autocorrelated. Without matching windows the ratio is that of whole "
     "batches, and Compared is latency_ms."),
    ("Interleaved windows, group", "Cells alternate within a batch, in groups of four runs of "
     "a few windows. The ratio is then Huber's robust location of the groups' log ratios, and "
     "Compared is device_ms (the GPU's clock) or wall_ms (the host's)."),
    ("Decided by", "windows: the ratio is that of groups. batches: whole batches disagree with it, "
     "or groups are too few, so whole batches decide."),
    ("Carry-over", "The ratio in runs of two windows over that in long runs: 1 if a mode has no "
     "effect on the windows after it."),
    ("Corrected for compared cells", "The answer's interval: Student's t at 1 - 0.05 / number of "
     "cells (Bonferroni), valid for all cells at once, so also for the best one. The intervals in "
     "tables are each cell's own. cells.csv has both."),
    ("FASTER, SLOWER", "The cell's own interval excludes 1, also after Holm's correction for the "
     "number of cells, and the ratio is farther from 1 than the noise floor."),
    ("SAME", f"The whole interval lies within {_MARGIN} of 1. For interleaved windows FASTER and "
     "SLOWER come first, because they show smaller differences."),
    ("AMBIGUOUS", "None of these: the run was too short or too noisy."),
    ("INEFFECTIVE", "The mode never fired, so it has no ratio."),
    ("INVALID", "The mode changed the model's output, or its counts do not add up: its times do "
     "not count."),
    ("Batches, p50 ms, p95 ms", "Timed batches of the cell, one a block; their median time and "
     "95th percentile."),
    ("Window ms", "Mean time from one window's start to the next."),
    ("Tokens/s", "Output tokens of all requests together, per second of the batches."),
    ("TTFT, TPOT, ITL", "Time to first token; time per output token, (whole time - TTFT) / (output "
     "tokens - 1); inter-token latency, from one output of a request to its next. A step puts out "
     "several tokens if drafts were accepted. p95 needs 20 samples, p99 100."),
    ("Drafts, Accepted", "Draft tokens proposed, and those that the model agreed with; as a "
     "percentage, the share."),
    ("Staged, Committed, Rejected", "Draft tokens kept out of the cache; those of them accepted "
     "and written later; those dropped. Staged = committed + rejected."),
    ("Stage operations", "Staged tokens x layers of the target model."),
    ("NWOR fallbacks", "Windows of a stage cell whose draft tokens were written directly."),
    ("Matched windows, Left out", "Windows with and without a partner of equal batch size and "
     "context in off x off."),
    ("Interval +-", "Half the width of the 95 % interval."),
    ("Smallest visible effect", "Four of five such runs would have shown an effect of this size."),
    ("p", "Chance of such a difference if there is none, by the interval's test, with Holm's "
     f"correction but for A/A; below {SIGNIFICANCE:g} counts."),
    ("Outlying blocks", "Blocks whose ratio is far from the others'. They count as well."),
    ("Rate, Length, Draft j", "Accepted over proposed draft tokens; tokens that a request gains a "
     "window, the bonus token included; the rate at position j of the draft."),
    ("Forward, Sample, Mask, Commit", "A window on the GPU: the model's forward pass with the "
     "preparation of attention; sampling; deciding which drafts were accepted; writing them."),
    ("Hooks ms, Deciding ms", "Host time that nwor-bench adds to a window, and the part of it that "
     "decides which drafts were accepted."),
    (NOT_MEASURED, "No value, never 0: it was not measured (an INVALID cell has no times at all); "
     "it does not apply (off x off, the reference, has no ratio to itself); it was not compared "
     "(the ratio of an INVALID or INEFFECTIVE cell); or there is none (no outlying block, no "
     "mismatch)."),
)  # fmt: skip


def glossary() -> Section:
    """The last section of a report."""
    return Section("Glossary", (Definitions(ENTRIES),), folded=True)
