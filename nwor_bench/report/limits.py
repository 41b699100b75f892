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


ENTRIES = (
    ("Window", "One verification step of speculative decoding: the model checks the draft tokens "
     "of all running requests in one forward pass."),
    ("NWOR", "No-write-on-reject. off: every draft token's K/V is written to the cache, as in "
     "stock vLLM. stage: it is kept out of the cache until the token is accepted. control: "
     "attention as in stage, writes as in off, so that the two effects can be told apart."),
    ("SCV", "Speculative cache validation decides which staged tokens were accepted. off: on the "
     "host. graph: by a kernel on the GPU, replayed as a CUDA graph. adaptive: the kernel is "
     "launched eagerly until a graph pays. As a column: whether it ran as asked."),
    ("Cell, reference", "NWOR mode x SCV mode. All cells are compared with off x off, the "
     "reference."),
    ("A/A, noise floor", "A/A is off x off a second time: its difference from off x off is noise. "
     "The noise floor (noise band) is how far its interval reaches from 1."),
    ("Block", "One set of prompts on which every cell runs once, in random order."),
    ("Time over off x off", "Geometric mean over blocks of the cell's mean window time divided by "
     "that of off x off, for windows of equal batch size and context (matched windows). 0.98 is "
     "2 % less time. The interval is Student's t on the blocks' log ratios, widened if they are "
     "autocorrelated. Without matched windows whole batches are compared (latency_ms)."),
    ("Interleaved windows", "Cells alternate within a batch, in groups of four runs of a few "
     "windows; device_ms is the GPU's clock, wall_ms the host's. Decided by batches: whole "
     "batches disagree with the windows, or groups are too few. Carry-over: the ratio in runs of "
     "two windows over that in long runs, 1 if a mode has no effect on the windows after it."),
    ("Corrected for compared cells", "The answer's interval is valid for all cells at once "
     "(Bonferroni), so also for the best one. The intervals in tables are each cell's own."),
    ("FASTER, SLOWER", "The cell's own interval excludes 1, also after Holm's correction for the "
     "number of cells, and the ratio is farther from 1 than the noise floor."),
    ("SAME", f"The whole interval lies within {100 * DEFAULT_MARGIN:g} % of 1. For interleaved "
     "windows FASTER and SLOWER come first, because they show smaller differences."),
    ("AMBIGUOUS", "None of these: the run was too short or too noisy."),
    ("INEFFECTIVE", "The mode never fired, so it has no ratio."),
    ("INVALID", "The mode changed the model's output, or its counts do not add up: its times do "
     "not count."),
    ("Staged, Committed, Rejected", "Draft tokens kept out of the cache; those of them accepted "
     "and written later; those dropped. Stage operations: staged tokens x target layers."),
    ("Length", "Tokens that a request gains in a window, the bonus token included."),
    ("Smallest visible effect", "Four of five such runs would have shown an effect of this size."),
    ("p", "Chance of such a difference if there is none, by the interval's test, with Holm's "
     f"correction but for A/A; below {SIGNIFICANCE:g} counts."),
    (NOT_MEASURED, "No value, never 0: it was not measured; it does not apply (the reference has "
     "no ratio to itself); or it was not compared (an INVALID cell has no times)."),
)  # fmt: skip


def glossary() -> Section:
    """The last section of a report."""
    return Section("Glossary", (Definitions(ENTRIES),), folded=True)
