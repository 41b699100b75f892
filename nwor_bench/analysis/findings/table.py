"""Findings: weaknesses of a run's numbers, their severity and remedy. Pure.

`TABLE` has one row a kind; the conditions are in `run`, `machine` and `interleaved`. A finding is
typed so that a report can group it and a CI job can act on it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """`note`: worth knowing. `warning`: it weakens a number. `error`: do not use the numbers."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class FindingKind(StrEnum):
    """Kinds of findings; the names are part of run.json's format."""

    TIME_BUDGET = "time_budget"
    CHECKS = "checks_took_long"
    AA_DIFFERS = "aa_differs"
    AA_MISSING = "aa_missing"
    NOISE_FLOOR = "noise_floor"
    FEW_BLOCKS = "few_blocks"
    FEW_GROUPS = "few_groups"
    INEFFECTIVE = "ineffective"
    AMBIGUOUS = "ambiguous"
    LATENCY = "latency_compared"
    UNMATCHED = "unmatched_windows"
    FALLBACKS = "fallbacks"
    STATES = "states_by_stock"
    NO_GRAPH = "windows_without_graph"
    WINDOWS_DISAGREE = "windows_disagree"
    CARRY_OVER = "carry_over"
    LONG_WINDOWS = "long_windows"
    CLOCK_EFFECT = "clock_effect"
    WARMUP = "warmup"
    TREND = "trend"
    HOST_PACE = "host_pace"
    LAUNCHES = "launches"
    ATTENTION = "attention_untimed"
    THROTTLING = "throttling"
    CLOCKS = "clocks"
    GPU_SHARED = "gpu_shared"
    CPU_BUSY = "cpu_busy"
    CPU_STEAL = "cpu_steal"
    MEMORY_PRESSURE = "memory_pressure"


@dataclass(frozen=True)
class Finding:
    """Something that weakens the run's numbers; `cell` is a cell's label if it is one cell's."""

    kind: FindingKind
    severity: Severity
    message: str
    remedy: str
    cell: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """Texts of one kind of finding."""

    severity: Severity
    sentence: str
    """With placeholders for the values of `found`."""
    remedy: str
    """Its first sentence is the one that a terminal shows."""
    clause: str
    """All findings of the kind in a few words; with `verb`, the words after "3 cells have"."""
    verb: str = ""
    """`be` or `have` for findings of single cells."""


_K, _NOTE, _WARNING = FindingKind, Severity.NOTE, Severity.WARNING

TABLE = {
    _K.TIME_BUDGET: Row(_WARNING, "{clause}.", "Write --time-budget {budget}.",
        "The gate left no time to measure"),
    _K.CHECKS: Row(_NOTE,
        "Warm-up, gate and whole batches took {spent} of the time budget of {budget:g} s, more "
        "than a third.", "Write --time-budget {enough}.", "Checks took more than a third"),
    _K.AA_DIFFERS: Row(_WARNING,
        "off x off against itself is {verdict} ({ratio}): one in twenty runs is by chance, more if "
        "something drifts.{switching}",
        "Measure again. If it repeats, use a quieter machine.", "off x off differs from itself"),
    _K.AA_MISSING: Row(_NOTE,
        "The run has no A/A arm (off x off against itself), so its noise floor is not known.",
        "Measure again with this version. Every sweep has one.", "No A/A arm, so no noise floor"),
    _K.NOISE_FLOOR: Row(_WARNING, "The noise floor, {floor:.2f} %, exceeds the effect of {cells}.",
        "Add blocks (--batches 20). Four times as many halve the floor.",
        "Effects are smaller than the noise floor"),
    _K.FEW_BLOCKS: Row(_NOTE, "{of}: {blocks}. With so few, intervals are wide.",
        "Add blocks (--batches 20). Or use --ci-width with the width that you need.",
        "Few timed blocks leave intervals wide"),
    _K.FEW_GROUPS: Row(_WARNING,
        "An interval needs {least} groups of windows that count. There are: {groups}.{decide}",
        "Measure longer, in longer batches. Write a longer --time-budget or more --batches, and "
        "more --max-new-tokens: a group counts if it ends within its batch.",
        "Too few groups of windows"),
    _K.INEFFECTIVE: Row(_WARNING, "{cells} never fired: {reason}.",
        "Find the reason under Evidence (fallbacks). Ignore its cells' times.",
        "A mode never fired"),
    _K.AMBIGUOUS: Row(_WARNING, "{name} is AMBIGUOUS: {reason}.{least}",
        "Add blocks (--batches 20). Four times as many halve the interval.",
        "too uncertain", "be"),
    _K.LATENCY: Row(_WARNING,
        "{name}: whole batches were compared, because windows have no time or none match.",
        "The ratio includes the prefill. It also compares unequal work if the cells accepted "
        "differently.", "compared by whole batches", "be"),
    _K.UNMATCHED: Row(_NOTE,
        "{name}: {left_out} windows have no partner of equal batch size and context in the other "
        "cell and are left out of its ratio ({matched} were matched).",
        "Use temperature 0. Both cells then run the same windows.", "windows without a match",
        "have"),
    _K.FALLBACKS: Row(_WARNING, "{name}: {share} of its windows were written directly ({reasons}).",
        "The ratio is a mixture. Evidence explains the reasons.",
        "windows that staged nothing", "have"),
    _K.STATES: Row(_WARNING,
        "Stock wrote the recurrent states of every staged window of {cells} ({reasons}). What was "
        "measured there is K/V only.", "Read states_reason in windows.csv. engine.log may have a "
        "traceback.", "Stock wrote states"),
    _K.NO_GRAPH: Row(_WARNING,
        "Windows of {tokens:,} tokens ({requests} requests, {drafts} drafts) have no CUDA graph: "
        "vLLM captured none above {most:,} tokens. Launched one by one they take longer.",
        "Capture larger ones. Write --engine-args '{{\"compilation_config\": "
        "{{\"max_cudagraph_capture_size\": {enough}}}}}'. Serve with the same graphs.",
        "The largest windows have no CUDA graph"),
    _K.WINDOWS_DISAGREE: Row(_WARNING,
        "{name}: neighbouring windows give {windows}, whole batches {batches}. The intervals do "
        "not overlap, so whole batches decide.",
        "Use --interleave batches. Report the disagreement.", "other ratios by windows",
        "have"),
    _K.CARRY_OVER: Row(_WARNING,
        "{name}: its ratio depends on the length of runs of windows. In runs of two it is {ratio} "
        "times that in long ones.",
        "Use --interleave batches. A mode affects the window after it.",
        "carry-over between windows", "have"),
    _K.LONG_WINDOWS: Row(_WARNING,
        "{name}: a few long windows carry a difference. The mean ratio is {mean}, without their "
        "weight it is {robust}.",
        "The verdict leaves them out. Find the cause in windows.csv.", "a few long windows",
        "have"),
    _K.CLOCK_EFFECT: Row(_WARNING, "{name}: its ratio depends on the GPU's clock: {slopes}.",
        "Lock the clocks. The ratio is valid at the clocks of this run (nvidia-smi "
        "--lock-gpu-clocks).", "ratios that depend on the GPU's clock", "have"),
    _K.WARMUP: Row(_WARNING, "Window times were not steady when warm-up ended: {why}.",
        "Raise --max-warmup. Or find what else runs on the machine.",
        "Window times were not steady after warm-up"),
    _K.TREND: Row(_WARNING,
        "Window times of off x off drifted by {drift:+.1f} % over {blocks} blocks (Mann-Kendall "
        "p = {p_value:.3f}).",
        "Warm up longer (--warmup), fix the clocks. Ratios are unaffected, since every block holds "
        "all cells; absolute times are not.", "Window times drifted"),
    _K.HOST_PACE: Row(_WARNING,
        "The run is host-bound: groups of windows that took longer on the host's clock did so on "
        "the GPU's too (rank correlation {least:.2f} or more, {name}). The GPU waited, so a "
        "difference in its work (shown beside the step) may not show in the step.",
        "Use a faster host, or more --requests. A quieter host or cores of its own (taskset) may "
        "do.", "The run is host-bound"),
    _K.LAUNCHES: Row(_NOTE,
        "Triton launched kernels that the driver launches directly elsewhere: {why}.",
        "This costs the host time. Some microseconds a window; vLLM's own Triton and a driver of "
        "CUDA 12.4 or later avoid it.", "Kernels were launched through Triton"),
    _K.ATTENTION: Row(_WARNING,
        "What attends windows could not be timed ({why}). A table chose it, so it may be slower "
        "than stock.", "Read why in engine.log. Or choose it with --attention.",
        "What attends windows could not be timed"),
    _K.THROTTLING: Row(_WARNING,
        "The GPU throttled in timed batches: {reasons} of {batches} batches, {held:.0f} ms held "
        "down.", "Cool it, or lock lower clocks. Or raise the power limit.", "The GPU throttled"),
    _K.CLOCKS: Row(_WARNING,
        "The GPU's SM clock ran from {low:.0f} to {high:.0f} MHz in timed batches.",
        "Lock it (nvidia-smi --lock-gpu-clocks). If you may not, add blocks.",
        "The GPU's clock changed"),
    _K.GPU_SHARED: Row(_WARNING,
        "Up to {most:.0f} other processes were on the GPU in {count} of {batches} timed batches.",
        "Measure on a GPU of your own.", "Other processes were on the GPU"),
    _K.CPU_BUSY: Row(_WARNING,
        "Other processes used up to {most} of the processors' time, more than {busy} in {count} of "
        "{batches} timed batches.", "Stop what else runs here.", "Other processes used the CPU"),
    _K.CPU_STEAL: Row(_WARNING,
        "The hypervisor took up to {most} of the processors' time, more than {busy} in {count} of "
        "{batches} timed batches.",
        "Use a machine that is not shared. Or measure at another time.",
        "The hypervisor took CPU time"),
    _K.MEMORY_PRESSURE: Row(_WARNING,
        "Memory ran short in timed batches: {faults:.0f} pages read from disk, {swapped:.1f} MB "
        "swapped in{least}.",
        "Free memory, or write fewer --requests. A smaller kv_cache_gib also helps.",
        "Memory ran short"),
}  # fmt: skip


def found(
    kind: FindingKind,
    cell: str | None = None,
    *,
    severity: Severity | None = None,
    sentence: str | None = None,
    remedy: str | None = None,
    **values: Any,
) -> Finding:
    """A finding by its row; arguments replace the row's texts, `values` fill the placeholders."""
    row = TABLE[kind]
    if cell is not None:
        values["name"] = cell
    return Finding(
        kind,
        severity or row.severity,
        (sentence or row.sentence).format(**values),
        (remedy or row.remedy).format(**values),
        cell,
    )


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one cause."""

    severity: Severity
    """The severest of the findings."""

    line: str
    """Finding and remedy in one line."""

    findings: tuple[Finding, ...]


def grouped(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The findings by cause, the severest group first."""
    groups = []
    for kind, row in TABLE.items():
        own = tuple(finding for finding in findings if finding.kind is kind)
        if own:
            severity = min((finding.severity for finding in own), key=rank)
            groups.append(FindingGroup(severity, _line(row, own), own))
    return sorted(groups, key=lambda group: rank(group.severity))


def rank(severity: Severity) -> int:
    """Sort key, lowest for the severest."""
    return -list(Severity).index(severity)


def _line(row: Row, findings: Sequence[Finding]) -> str:
    remedy = findings[0].remedy.split(". ")[0].rstrip(".")
    remedy = f"{remedy[0].lower()}{remedy[1:]}"
    if not row.verb:
        return f"{row.clause}: {remedy}"
    cells = len({finding.cell for finding in findings})
    one, several = {"be": ("is", "are"), "have": ("has", "have")}[row.verb]
    who = f"1 cell {one}" if cells == 1 else f"{cells} cells {several}"
    return f"{who} {row.clause}: {remedy}"
