"""Is the output of speculative decoding that of plain decoding? From the gates of `check`. Pure.

Each batch size is a run of two stock engines: k drafts, and none. A/A is plain decoding once more:
if it differs from itself, nothing can be said of k.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.findings.finding import FindingKind
from nwor_bench.analysis.parity.tokens import EXACT, EXPLAINED, INVALID, TIES_EVENT
from nwor_bench.analysis.worth import batch_size
from nwor_bench.models.methods import PROMPT_LOOKUP
from nwor_bench.records.cell import AA
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import CellResult, RunStatus, Verdict

OF_DRAFTS = (FindingKind.DRAFTER_CONTEXT, FindingKind.ACCEPTANCE, FindingKind.PREFIX_BLOCK)


class CheckVerdict(StrEnum):
    """What a check found, the best first."""

    RIGHT = "RIGHT"
    TIES = "RIGHT BUT FOR TIES"
    NOT_CHECKED = "NOT CHECKED"
    WRONG = "WRONG"


_BY_PARITY = {EXACT: CheckVerdict.RIGHT, EXPLAINED: CheckVerdict.TIES, INVALID: CheckVerdict.WRONG}


@dataclass(frozen=True)
class SizeCheck:
    """The check at one batch size; a value is None or empty if it was not measured."""

    requests: int
    verdict: CheckVerdict
    why: str | None = None
    """Why it is NOT CHECKED or WRONG."""
    tokens: int | None = None
    """Output tokens that were compared."""
    places: tuple[Mapping[str, Any], ...] = ()
    """Differing tokens, as the event `ties` has them, with the name of their `prompt`."""
    allowance: float | None = None
    """The largest gap of a tie, in nats; measured if a token differs."""
    acceptance: tuple[float, ...] = ()
    """Share of a request's windows that accepted draft 1, 2, ..."""

    @property
    def first_wrong(self) -> Mapping[str, Any] | None:
        """The first differing token that is not a tie."""
        return next((place for place in self.places if not place["is_tie"]), None)

    @property
    def largest_gap(self) -> float | None:
        """The largest known gap of a differing token, in nats."""
        return max((p["gap"] for p in self.places if p["gap"] is not None), default=None)


@dataclass(frozen=True)
class Check:
    """All batch sizes of one pair together."""

    sizes: tuple[SizeCheck, ...]
    """The smallest first."""
    header: RunHeader
    """One of the runs'; they differ in the batch size."""
    warnings: tuple[str, ...] = ()
    """What a sweep would find too (`analysis.findings`), in every batch size with drafts."""

    @property
    def worst(self) -> SizeCheck:
        """The first batch size with the worst verdict, which is that of all."""
        return max(self.sizes, key=lambda own: list(CheckVerdict).index(own.verdict))

    @property
    def first_drafts(self) -> float | None:
        """The largest acceptance rate of the first draft."""
        return max((own.acceptance[0] for own in self.sizes if own.acceptance), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        sizes = [asdict(own) for own in self.sizes]
        return {"verdict": self.worst.verdict, "sizes": sizes, "known_causes": [*causes(self)]}


def check_of(analyses: Sequence[Analysis], lost: Mapping[int, str | None] | None = None) -> Check:
    """The check of runs of one pair that differ in the batch size; `lost` has the batch sizes
    without records, and why."""
    sizes = [SizeCheck(n, CheckVerdict.NOT_CHECKED, why) for n, why in (lost or {}).items()]
    sizes = sorted([*sizes, *map(_size, analyses)], key=lambda own: own.requests)
    drafted = [a for a in analyses if any(cell.draft_tokens for cell in a.cells)] or analyses
    found = [{f.kind: f.message for f in own.findings if f.kind in OF_DRAFTS} for own in drafted]
    shared = (text for kind, text in found[0].items() if all(kind in others for others in found))
    return Check(tuple(sizes), analyses[0].run.header, tuple(shared))


def _size(analysis: Analysis) -> SizeCheck:
    run, requests = analysis.run, batch_size(analysis.run)
    counts = [cell for cell in analysis.cells if cell.cell.drafts]  # a sweep file may have several
    cell = min(counts, key=lambda cell: cell.parity != INVALID, default=None)
    why = _why_not(analysis, cell)
    if why is not None or cell is None:
        return SizeCheck(requests, CheckVerdict.NOT_CHECKED, why)
    ties = [e for e in run.events if e.get("event") == TIES_EVENT and e.get("arm") == cell.arm]
    event = ties[-1] if ties else {}
    prompts = next((block.prompt_ids or () for block in run.header.blocks or ()), ())
    return SizeCheck(
        requests,
        _BY_PARITY[str(cell.parity)],
        cell.reason if cell.parity == INVALID else None,
        event.get("tokens_compared", cell.output_tokens),
        tuple({**p, "prompt": prompts[p["request"]]} for p in event.get("places", ())),
        event.get("allowance"),
        cell.acceptance_per_position,
    )


def _why_not(analysis: Analysis, cell: CellResult | None) -> str | None:
    """Why nothing can be said of a batch size; None if its tokens were compared."""
    again = [own for own in analysis.cells if own.arm == AA and own.parity == INVALID]
    if again:
        return f"plain decoding does not repeat itself: {again[0].reason}"
    if cell is not None and cell.parity == INVALID:
        return None
    if cell is None or analysis.run.header.status is not RunStatus.COMPLETE:
        errors = [event["error"] for event in analysis.run.events if "error" in event]
        return (errors or ["it was interrupted"])[-1]
    if cell.verdict == Verdict.INEFFECTIVE:
        return f"{cell.reason}, so nothing was verified"
    return None if cell.parity in _BY_PARITY else f"its parity is {cell.parity}"


def causes(check: Check) -> Iterator[str]:
    """Known causes of what was found, and of what other requests would meet."""
    header, engine = check.header, check.header.engine
    yield from check.warnings
    if engine.state_slots is None or check.worst.verdict in (CheckVerdict.RIGHT, CheckVerdict.TIES):
        return
    if header.pair.method in PROMPT_LOOKUP and engine.device == "cpu":
        yield (
            "prompt lookup on a hybrid (recurrent layers): vLLM's CPU build 0.32 gives other "
            "tokens or dies (num_accepted_tokens); right on an H100"
        )
    if header.spec.engine_args.get("enable_prefix_caching"):
        yield (
            "prefix caching beside speculation on a hybrid: vLLM's CPU build 0.32 dies, and a "
            "state may be cached behind a rejected draft; repeat it without enable_prefix_caching"
        )
