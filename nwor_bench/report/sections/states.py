"""A hybrid's recurrent states, which no mode changes: what a window moves of them, predicted."""

from collections.abc import Sequence

from nwor_bench.analysis.aggregate import REFERENCE
from nwor_bench.records.engine_status import EngineStatus, RecurrentFacts
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Block, Paragraph
from nwor_bench.report.text import decimal, plural, size


def state_blocks(header: RunHeader, cells: Sequence[CellResult]) -> list[Block]:
    """A paragraph for a model with recurrent layers, none for others."""
    facts = (header.engine or EngineStatus()).recurrent
    if facts is None or not facts.layers:
        return []
    own = (
        f"The target has {plural(facts.layers, 'recurrent layer')}, whose states take "
        f"{size(facts.state_bytes)} a request. Drafts of such a model are written directly, and no "
        "mode changes what is moved of its states."
    )
    return [Paragraph(own + _of_window(header, facts, _mean_drafts(cells)))]


def _mean_drafts(cells: Sequence[CellResult]) -> float | None:
    """Drafts of off x off's mean window; None if it is not known."""
    baseline = next((cell for cell in cells if cell.verdict == REFERENCE), None)
    if baseline is None or not baseline.windows or not baseline.draft_tokens:
        return None
    return baseline.draft_tokens / baseline.windows


def _of_window(header: RunHeader, facts: RecurrentFacts, drafts: float | None) -> str:
    per_request = (header.scenario or {}).get("draft_tokens")
    if not facts.state_bytes or not drafts or not per_request:
        return ""
    requests = drafts / per_request
    one = requests * facts.state_bytes
    every = one + drafts * facts.state_bytes
    return (
        f" Predicted for this run's mean window ({decimal(drafts)} drafts): stock vLLM reads "
        f"{size(round(one))} of states and writes {size(round(every))}, one at every token; "
        f"committing one state a request on acceptance would write {size(round(one))}. "
        "nwor-bench plan has the ways to do so, and where they pay."
    )
