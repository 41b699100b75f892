"""What the words and columns of a report mean: one place, at its end."""

from nwor_bench.analysis.significance import DEFAULT_MARGIN, SIGNIFICANCE
from nwor_bench.report.document import Definitions, Section
from nwor_bench.report.text import NOT_MEASURED

_MARGIN = f"{100 * DEFAULT_MARGIN:g} %"

ENTRIES = (
    ("Window", "One verification step of speculative decoding: the model checks the draft tokens "
     "of all running requests in one forward pass."),
    ("NWOR (off, stage)", "No-write-on-reject. off: every draft token's K/V is written to the "
     "cache, as stock vLLM does. stage: it is kept out until the token is accepted."),
    ("SCV (off, graph, adaptive)", "Speculative cache validation: who decides which staged tokens "
     "were accepted. off: the host. graph: a kernel on the GPU, replayed as a CUDA graph. "
     "adaptive: the kernel alone until a graph pays."),
    ("Cell", "NWOR mode x SCV mode. off x off is what all others are compared with."),
    ("A/A", "off x off a second time, compared with the first like any other cell: what they "
     "differ by is noise. In windows in turn it switches as stage does, so that a bias of "
     "switching shows too."),
    ("Block", "One set of prompts on which every cell runs once, in an order drawn at random."),
    ("Time over off x off [95 % interval]", "Geometric mean over blocks of the cell's mean window "
     "time divided by that of off x off on the same prompts, windows of equal batch size and "
     "context matched. Below 1 is faster: 0.98 is 2 % less time. The interval is Student's t on "
     "the blocks' log ratios, widened where they are autocorrelated; it is the cell's own. Where "
     "windows could not be timed or matched it is the time of whole batches, and Compared says "
     "latency_ms."),
    ("Windows in turn, group", "Cells alternate within a batch. A group is four runs of a few "
     "windows, A B B A or B A A B; the first window of each run does not count. Where such groups "
     "were measured the ratio is theirs: Huber's robust location of the groups' log ratios, its "
     "interval widened where groups are autocorrelated. Compared then says device_ms (the GPU's "
     "clock) or wall_ms (the host's)."),
    ("Decided by", "windows: the ratio is that of groups. batches: whole batches disagree with it, "
     "or groups are too few, so whole batches decide."),
    ("Mean ratio", "The plain mean of the groups: rare long windows count in full."),
    ("Carry-over", "The ratio in runs of two windows over that in long runs: 1 if a mode leaves "
     "nothing behind in the windows after it."),
    ("control; attention, writes", "control x off reads draft tokens' K/V as stage does and writes "
     "them directly as off does. Control over off is what the other attention kernel is worth; "
     "stage over control what not writing is worth, validation and commit included."),
    ("Corrected for compared cells", "The answer's interval: Student's t at 1 - 0.05 / number of "
     "cells (Bonferroni), so that all cells' intervals hold at once in 95 % of runs, and with them "
     "that of the cell which came out best. cells.csv has it as ratio_simultaneous_low and _high."),
    ("FASTER, SLOWER", "The cell's own interval excludes 1, still does after Holm's correction "
     "for the number of cells, and the ratio is farther from 1 than the noise floor."),
    ("SAME", f"The whole interval lies within {_MARGIN} of 1. Where windows took turns FASTER and "
     "SLOWER come first, since so small a difference can be told there."),
    ("AMBIGUOUS", "None of these: the run was too short or too noisy to say."),
    ("INEFFECTIVE", "The mode never fired, so its time says nothing of it and it has no ratio."),
    ("INVALID", "The mode changed the model's output, or its counts do not add up: no time of it "
     "counts."),
    ("reference", "off x off itself, which the others are compared with."),
    ("Noise floor, noise band", "How far the A/A cell's interval reaches from 1."),
    ("p50 ms, p95 ms", "Time of whole batches in milliseconds: median and 95th percentile."),
    ("Window ms", "Mean time from one window's start to the next, in milliseconds."),
    ("Tokens/s", "Output tokens of all requests together, per second of the batches."),
    ("TTFT, TPOT, ITL", "vLLM's own request metrics, as in vllm bench serve. Time to first token: "
     "from a request's arrival to its first token. Time per output token: (whole time - TTFT) / "
     "(output tokens - 1). Inter-token latency: from one output of a request to its next; a step "
     "puts out several tokens where drafts were accepted. p95 needs 20 samples, p99 100."),
    ("Batches", "Timed batches of the cell, one a block."),
    ("Drafts, Accepted", "Draft tokens proposed, and those that the model agreed with."),
    ("Staged, Committed, Rejected", "Draft tokens kept out of the cache; those of them accepted "
     "and written later; those dropped. Staged = committed + rejected."),
    ("Stage operations", "Staged tokens x layers of the target model."),
    ("NWOR fallbacks", "Windows of a stage cell whose draft tokens were written directly."),
    ("SCV (column)", "Whether SCV ran as asked: ok, INEFFECTIVE, or off."),
    ("Compared, Matched windows, Left out", "Which time the ratio compares; how many windows found "
     "a partner of equal batch size and context in off x off, and how many of both did not."),
    ("Interval +-", "Half the width of the 95 % interval."),
    ("Block bootstrap", "The same ratio's interval by drawing whole blocks with replacement. It "
     "stands beside and decides nothing: with few blocks it is too narrow."),
    ("Smallest effect to be seen", "An effect of this size would have been called in four of five "
     "such runs."),
    ("p, p (Wilcoxon)", "Chance of such a difference where there is none: of the interval's test, "
     "and of the signed rank test on the blocks. Corrected for the number of cells (Holm) but for "
     f"A/A; below {SIGNIFICANCE:g} counts."),
    ("Outlying blocks", "Blocks whose ratio stands apart from the others'. They count all the "
     "same."),
    ("Rate, Length, Draft j", "Accepted over proposed draft tokens; tokens that a request gains a "
     "window, the bonus token included; the rate at position j of the draft."),
    ("Forward, Sample, Mask, Commit", "A window on the GPU: the model's forward pass with the "
     "preparation of attention; sampling; deciding what was accepted; writing it to the cache."),
    ("Probe", "A probed window's time over a timed one's: what the measuring itself costs."),
    ("Hooks ms, Deciding ms", "Host time that nwor-bench adds to a window, and the part of it that "
     "decides what was accepted, waiting for the GPU included."),
    (NOT_MEASURED, "No value, never 0: it was not measured (an INVALID cell has no times at all); "
     "it does not apply (off x off, the reference, has no ratio to itself); it was not compared "
     "(the ratio of an INVALID or INEFFECTIVE cell); or there is none to name (no outlying block, "
     "no mismatch)."),
)  # fmt: skip


def glossary() -> Section:
    """The last section of a report."""
    return Section("Glossary", (Definitions(ENTRIES),), folded=True)
