"""The checks of the gate that a cell needs before it gets a verdict. Pure.

| check | needed by | instead of it |
| --- | --- | --- |
| tokens or acceptance | every cell | |
| K/V end to end | cells that stage, and mode control | see below |
| recurrent states end to end | cells that staged states | see below |
| each layer on its own inputs | cells that stage, and mode control | |
| every path of its timed windows (`ungated_paths`) | cells that stage, and mode control | |
| K/V (and states) of an interleaved batch | those of them that were timed in one | as for both |
| at least half the share of staged drafts that was timed | cells that stage, and mode control | |

Instead of a comparison through the whole model: equal tokens under the exact rule (float32), which
wrong values would change; or, if the model is too unstable for a comparison (`TOO_BLUNT`), each
layer on its own inputs. An engine of its own has a cache that is not compared with off x off's: if
its tokens follow the target, its layers decide.

Runs of older versions have no check of layers at all. They are judged by their own rule: the K/V
gate, with synthetic acceptance.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.parity.kv import NO_RECORD, is_sound, why_missing
from nwor_bench.analysis.parity.tokens import ACCEPTANCE_ONLY, EXACT, LOSSY, ParityRule
from nwor_bench.records.cell import NworMode
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.records.types import WindowRecord

GATE_DID_NOT = "the gate did not "
"""Begin of each reason but that of tokens."""

Check = Callable[[CellData], str | None]
"""Why a check that the cell needs is missing, in words; None if it is there or not needed."""


def missing_checks(cell: CellData) -> str | None:
    """The checks that the cell needs and that compared nothing, with their reasons; None if all
    are there. A check that failed is none of them: it makes the cell INVALID."""
    found = [why for why in (check(cell) for check in CHECKS) if why is not None]
    return "; ".join(found) or None


def _tokens(cell: CellData) -> str | None:
    return "its output was not checked" if cell.parity is None else None


def _kv(cell: CellData) -> str | None:
    if not _has_values(cell):
        return None
    if not cell.gate.checks_layers and cell.parity not in (ACCEPTANCE_ONLY, LOSSY):
        return None  # as older versions had it
    if _is_other_engine(cell) and cell.parity not in (ACCEPTANCE_ONLY, LOSSY):
        return None
    return _end_to_end(cell, "K/V", cell.gate.kv)


def _states(cell: CellData) -> str | None:
    if not _stages_states(cell) or _is_other_engine(cell):
        return None
    return _end_to_end(cell, "recurrent states", (cell.gate.kv or {}).get("states"))


def _layers(cell: CellData) -> str | None:
    if not _has_values(cell) or not cell.gate.checks_layers:
        return None
    found = cell.gate.local
    if not is_sound(found):
        reason = (found or {}).get("reason") or NO_RECORD
        return f"{GATE_DID_NOT}check its layers on their own inputs ({reason})"
    if _stages_states(cell) and not _layers_passed(cell, states=True):
        return f"{GATE_DID_NOT}check its recurrent states on their own inputs"
    return None


def _interleaved(cell: CellData) -> str | None:
    acted = any(window.staged_tokens or window.control_tokens for window in cell.interleaved)
    if not acted or not _has_values(cell) or not cell.gate.checks_layers:
        return None
    if not cell.gate.interleaved_kv:
        return f"{GATE_DID_NOT}run it in an interleaved batch"
    whys = []
    for found in cell.gate.interleaved_kv:
        why = _end_to_end(cell, "interleaved K/V", found)
        if why is None and _stages_states(cell):
            why = _end_to_end(cell, "interleaved recurrent states", found.get("states"))
        whys.append(why)
    return None if None in whys else whys[-1]


def _paths(cell: CellData) -> str | None:
    ungated = "; ".join(cell.ungated)
    return f"timed on a path that the gate did not compare: {ungated}" if ungated else None


def _staged_share(cell: CellData) -> str | None:
    if not _has_values(cell) or not cell.gate.checks_layers or not cell.measured:
        return None
    gate, timed = _share(cell.gated), _share(cell.counted)
    if gate is None or timed is None or gate >= timed / 2:
        return None
    reasons = Counter(w.fallback_reason for w in cell.gated if w.fallback_reason is not None)
    why = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
    return (
        f"{GATE_DID_NOT}stage what was timed: {gate:.0%} of its drafts, {timed:.0%} timed ({why})"
    )


def _share(windows: Sequence[WindowRecord]) -> float | None:
    """Part of the drafts, of windows without a prefill beside, that were staged or control's."""
    own = [w for w in windows if w.fallback_reason != BESIDE_PREFILL]
    acted = sum(window.staged_tokens + window.control_tokens for window in own)
    drafts = sum(window.draft_tokens for window in own)
    return acted / drafts if drafts else None


CHECKS: tuple[Check, ...] = (
    *(_tokens, _kv, _states, _layers, _interleaved),
    *(_paths, _staged_share),
)


def _has_values(cell: CellData) -> bool:
    """Mode off computes as off x off does: stock, or another engine of it."""
    return cell.cell.nwor_mode is not NworMode.OFF


def _is_other_engine(cell: CellData) -> bool:
    return cell.cell.arm is not None and cell.cell.drafts is None


def _stages_states(cell: CellData) -> bool:
    staged = any(window.states_committed for window in cell.counted)
    return staged and cell.gate.checks_layers


def _end_to_end(cell: CellData, what: str, found: Mapping[str, Any] | None) -> str | None:
    """Why a comparison through the whole model is missing, with nothing instead of it."""
    equal = cell.parity == EXACT and cell.gate.rule == ParityRule.EXACT
    passed = _layers_passed(cell, states="states" in what)
    why = why_missing(found, equal_tokens=equal, layers=passed)
    return None if why is None else f"{GATE_DID_NOT}compare its {what} with mode off's ({why})"


def _layers_passed(cell: CellData, *, states: bool) -> bool:
    found = cell.gate.local
    return is_sound(found) and (not states or bool((found or {}).get("states")))
