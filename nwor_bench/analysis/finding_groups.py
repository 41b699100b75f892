"""Findings of one cause on one line: what a reader has time for. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from nwor_bench.analysis.finding import Finding, FindingKind, Severity

_UNCERTAIN = (FindingKind.AMBIGUOUS, FindingKind.NOISE_FLOOR, FindingKind.FEW_BLOCKS)
"""One cause: the intervals are too wide."""

_SEVERAL = {
    FindingKind.AMBIGUOUS: ("{} are too uncertain", "add blocks (four times as many halve "
                            "the interval)"),
    FindingKind.RANK_TEST: ("{} rest on a few blocks", "add blocks"),
    FindingKind.OUTLIERS: ("{} have outlying blocks, which count all the same", "look at the "
                           "conditions of their batches"),
    FindingKind.LATENCY: ("{} were compared by whole batches, not windows", "their ratios hold the "
                          "prefill too"),
    FindingKind.UNMATCHED: ("{} have windows without an equal partner in off x off", "use "
                            "temperature 0"),
    FindingKind.FALLBACKS: ("{} wrote some windows directly", "their ratios are those of the "
                            "mixture; see 'Fallbacks by reason'"),
    FindingKind.INEFFECTIVE: ("{} kinds of cells never fired", "see 'Fallbacks by reason'"),
    FindingKind.TORN: ("The run was resumed, and {} incomplete records were measured again",
                       "nothing to do"),
    FindingKind.SUPERSEDED: ("{} blocks were cut and run again whole", "nothing to do"),
}  # fmt: skip
"""What is wrong where several findings share a kind, with {} for how many, and what to do."""

_OF_CELLS = frozenset(_SEVERAL) - {
    FindingKind.INEFFECTIVE,
    FindingKind.TORN,
    FindingKind.SUPERSEDED,
}


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one cause."""

    severity: Severity
    """The severest of them."""

    line: str
    """What is wrong, and what to do about it."""

    findings: tuple[Finding, ...]
    """All of them, in their order."""


def grouped(findings: Sequence[Finding]) -> list[FindingGroup]:
    """One group a cause, in the order of each cause's first finding."""
    uncertain = any(finding.kind is FindingKind.AMBIGUOUS for finding in findings)
    causes: dict[tuple[FindingKind, str], list[Finding]] = {}
    for finding in findings:
        kind = finding.kind
        if uncertain and kind in _UNCERTAIN:
            kind = FindingKind.AMBIGUOUS
        # Two of a kind without common words are two causes.
        alone = "" if kind in _SEVERAL else finding.message
        causes.setdefault((kind, alone), []).append(finding)
    return [_group(kind, own) for (kind, _), own in causes.items()]


def _group(kind: FindingKind, own: Sequence[Finding]) -> FindingGroup:
    order = list(Severity)
    severity = max((finding.severity for finding in own), key=order.index)
    same = [finding for finding in own if finding.kind is kind]
    if len(same) == 1:
        return FindingGroup(severity, f"{same[0].message} {same[0].remedy}", tuple(own))
    what, remedy = _SEVERAL[kind]
    number = f"{len(same)} cells" if kind in _OF_CELLS else str(len(same))
    remedies = {finding.remedy for finding in same}
    shared = remedies.pop() if len(remedies) == 1 else ""
    # A remedy that was put in the place of the usual one, as for runs on a CPU, stays.
    if shared.startswith("Nothing to do"):
        remedy = shared[0].lower() + shared[1:].rstrip(".")
    return FindingGroup(severity, f"{what.format(number)}: {remedy}.", tuple(own))
