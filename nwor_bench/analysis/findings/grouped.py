"""Findings by cause, one line each: what a terminal shows of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from nwor_bench.analysis.findings.finding import Finding, FindingKind, Severity

_K = FindingKind
_ADD_BLOCKS = "add blocks (--batches 20)"


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one cause."""

    severity: Severity
    """The severest of the findings."""

    line: str
    """What was found and what to do, in one line."""

    findings: tuple[Finding, ...]
    """All of them, in their order."""


@dataclass(frozen=True)
class _Cause:
    """How the findings of one kind are told together."""

    found: str
    """A clause; with `verbs` what follows "3 cells have"."""

    remedy: str
    """What to do about it, or what it means for the numbers."""

    verbs: tuple[str, str] | None = None
    """The verb behind "1 cell" and behind "3 cells"; None where it concerns the whole run."""

    says_value: bool = False
    """The finding's own remedy is told, since it holds a value; in several runs, `remedy`."""


_CAUSES = {
    _K.TIME_BUDGET: _Cause("The gate left no time to measure", "raise --time-budget",
        says_value=True),
    _K.AMBIGUOUS: _Cause("too uncertain", _ADD_BLOCKS, ("is", "are")),
    _K.NOISE_FLOOR: _Cause("Effects are smaller than the noise floor", _ADD_BLOCKS),
    _K.FEW_BLOCKS: _Cause("Few timed blocks leave intervals wide", _ADD_BLOCKS),
    _K.INEFFECTIVE: _Cause("A mode never fired", "its cells' times say nothing of it"),
    _K.FALLBACKS: _Cause("windows that staged nothing", "the ratio is a mixture",
        ("has", "have")),
    _K.LATENCY: _Cause("compared by whole batches", "the ratio holds the prefill",
        ("is", "are")),
    _K.UNMATCHED: _Cause("windows without a match", "use temperature 0", ("has", "have")),
    _K.OUTLIERS: _Cause("outlying blocks", "batches.csv has the conditions", ("has", "have")),
    _K.WINDOWS_DISAGREE: _Cause("other ratios by windows", "whole batches decide",
        ("has", "have")),
    _K.CARRY_OVER: _Cause("carry-over between windows", "use --interleave batches",
        ("has", "have")),
    _K.LONG_WINDOWS: _Cause("a few long windows", "the ratio leaves them out", ("has", "have")),
    _K.CLOCK_EFFECT: _Cause("ratios that go with the GPU's clock", "lock it", ("has", "have")),
    _K.GROUPS_LEFT_OUT: _Cause("groups that do not count", "report.html has the reasons",
        ("has", "have")),
    _K.FEW_GROUPS: _Cause("Too few groups of windows", "measure longer, in longer batches"),
    _K.AA_MISSING: _Cause("No A/A arm, so no noise floor", "resume the run, or measure anew"),
    _K.WARMUP: _Cause("Window times were not steady after warm-up", "raise --max-warmup"),
    _K.TREND: _Cause("Window times drifted", "warm up longer (--warmup), fix the clocks"),
    _K.THROTTLING: _Cause("The GPU throttled", "cool it, or lock lower clocks"),
    _K.CLOCKS: _Cause("The GPU's clock changed", "lock it (nvidia-smi --lock-gpu-clocks)"),
    _K.GPU_SHARED: _Cause("Other processes were on the GPU", "measure on a GPU of your own"),
    _K.CPU_BUSY: _Cause("Other processes used the CPU", "stop what else runs here"),
    _K.CPU_STEAL: _Cause("The hypervisor took CPU time", "use a machine that is not shared"),
    _K.HOST_PACE: _Cause("The host sets the pace", "use a faster host, or more --requests"),
    _K.LAUNCHES: _Cause("Kernels were launched through Triton", "this costs the host time"),
    _K.MEMORY_PRESSURE: _Cause("Memory ran short", "free memory, or write fewer --requests"),
    _K.TORN: _Cause("A crash cut off records", "nothing to do, they were measured again"),
    _K.SUPERSEDED: _Cause("Blocks were cut and run again", "nothing to do"),
}  # fmt: skip


def grouped(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The findings by cause, the severest group first."""
    groups = [_of_one(finding) for finding in findings if finding.kind is _K.AA_DIFFERS]
    for kind, cause in _CAUSES.items():
        own = tuple(finding for finding in findings if finding.kind is kind)
        if own:
            groups.append(FindingGroup(_severest(own), _line(cause, own), own))
    return sorted(groups, key=lambda group: _rank(group.severity))


def _of_one(finding: Finding) -> FindingGroup:
    """What casts doubt on every cell is told in full."""
    return FindingGroup(finding.severity, f"{finding.message} {finding.remedy}", (finding,))


def _line(cause: _Cause, findings: Sequence[Finding]) -> str:
    remedies = {finding.remedy for finding in findings}
    remedy = cause.remedy
    # A CPU run's remedy replaces the usual one: more blocks would say no more of a GPU.
    if all(text.startswith("Nothing to do") for text in remedies):
        remedy = "nothing to do"
    if cause.says_value and len(remedies) == 1:
        (own,) = remedies
        remedy = f"{own[0].lower()}{own[1:].rstrip('.')}"
    if cause.verbs is None:
        return f"{cause.found}: {remedy}"
    cells = len({finding.cell for finding in findings})
    who = f"1 cell {cause.verbs[0]}" if cells == 1 else f"{cells} cells {cause.verbs[1]}"
    return f"{who} {cause.found}: {remedy}"


def _severest(findings: Sequence[Finding]) -> Severity:
    return min((finding.severity for finding in findings), key=_rank)


def _rank(severity: Severity) -> int:
    """0 for the severest."""
    return -list(Severity).index(severity)
