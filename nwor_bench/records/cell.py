"""A cell: a pair of models, an NWOR mode, an SCV mode and an arm."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

AA = "A/A"
"""`arm` of the second off x off: its difference from the first is noise."""


INTERLEAVED = "interleaved"
"""`arm` of what a check found in an interleaved batch, which is no cell's own."""

DRAFTS = "k="
"""Begin of the `arm` of a cell that runs a number of drafts of its own: `k=0`, `k=2`."""

ADAPTIVE = -1
"""Draft count of a cell with adaptive verification: vLLM decides in each step how many of the most
drafts a request verifies."""

ADAPTIVE_VERIFICATION = "enable_adaptive_verification"
"""What switches it on in vLLM's speculative_config."""

ADAPTIVE_ARM = f"{DRAFTS}adaptive"
"""Its `arm`."""

SHAM = "sham"
"""What the A/A arm runs in an interleaved batch: off, switched to as stage is."""

SWITCHED = "switched"
"""A sham's windows that ran as such; other counts are by the reason for which they did not."""


class NworMode(StrEnum):
    """Where a draft token's K/V goes: straight to the cache, or staged until it is accepted."""

    OFF = "off"
    STAGE = "stage"
    CONTROL = "control"
    """The attention of stage with the direct writes of off: it separates the two effects."""


class ScvMode(StrEnum):
    """Who decides which drafts were accepted: the host, a graph-replayed kernel, or adaptively."""

    OFF = "off"
    GRAPH = "graph"
    ADAPTIVE = "adaptive"


_NWOR_ORDER = {mode: place for place, mode in enumerate(NworMode)}
_SCV_ORDER = {mode: place for place, mode in enumerate(ScvMode)}


@dataclass(frozen=True)
class Cell:
    """One (pair, NWOR mode, SCV mode); the key of all data stored by cell."""

    pair: str
    """The pair's name."""

    nwor_mode: NworMode

    scv_mode: ScvMode

    arm: str | None = None
    """"A/A" for the second reference, which is run and compared like any other cell so that the
    run shows its own noise floor; `k=2` if the cell has a draft count of its own, `k=adaptive` with
    adaptive verification; the arguments of `--against` (see `engine_arm`) for the engine that has
    them; else None."""

    @classmethod
    def from_names(cls, names: Mapping[str, Any]) -> "Cell":
        """The cell that an event names (see `names`). Raises ValueError for an unknown mode."""
        modes = NworMode(names["nwor_mode"]), ScvMode(names["scv_mode"])
        return cls(names["pair"], *modes, names.get("arm"))

    @property
    def is_baseline(self) -> bool:
        """True for the cell against which every other one is compared: off x off, or k = 0."""
        off = self.nwor_mode is NworMode.OFF and self.scv_mode is ScvMode.OFF
        return off and self.arm in (None, drafts_arm(0))

    @property
    def drafts(self) -> int | None:
        """Drafts per request and window if the cell has a count of its own, or ADAPTIVE; else
        None."""
        return drafts_of(self.arm)

    @property
    def stock_twin(self) -> "Cell | None":
        """The cell with the same draft count and NWOR off, with which a staged one is compared;
        None for other cells."""
        if self.drafts is None or self.nwor_mode is NworMode.OFF:
            return None
        return Cell(self.pair, NworMode.OFF, ScvMode.OFF, self.arm)

    @property
    def label(self) -> str:
        """For people: `stage x graph`, `off x off (A/A)`."""
        return label_of(self.nwor_mode, self.scv_mode, self.arm)

    @property
    def names(self) -> dict[str, str | None]:
        """The cell in an event of the records."""
        return {
            "pair": self.pair,
            "nwor_mode": str(self.nwor_mode),
            "scv_mode": str(self.scv_mode),
            "arm": self.arm,
        }


def drafts_arm(drafts: int) -> str:
    """The arm of a cell with this draft count."""
    return ADAPTIVE_ARM if drafts == ADAPTIVE else f"{DRAFTS}{drafts}"


def drafts_of(arm: str | None) -> int | None:
    """The draft count of an arm; None for other arms. Raises ValueError for no number."""
    if arm == ADAPTIVE_ARM:
        return ADAPTIVE
    return int(arm.removeprefix(DRAFTS)) if arm and arm.startswith(DRAFTS) else None


def label_of(nwor_mode: str, scv_mode: str, arm: str | None) -> str:
    """A cell's name for people: `stage x graph`, `off x off (A/A)`, `k = 2, stage x off`."""
    drafts = drafts_of(arm)
    if drafts is not None:
        staged = "" if nwor_mode == NworMode.OFF else f", {nwor_mode} x {scv_mode}"
        return f"k = {count_name(drafts)}{staged}"
    return f"{nwor_mode} x {scv_mode}" + (f" ({arm})" if arm else "")


def count_name(drafts: int) -> str:
    """A draft count in tables: `2`, `adaptive`."""
    return "adaptive" if drafts == ADAPTIVE else str(drafts)


def count_order(drafts: int) -> int:
    """Sort key of draft counts: ascending, ADAPTIVE last."""
    return 99_999 if drafts == ADAPTIVE else drafts


def engine_arm(arguments: Mapping[str, Any]) -> str:
    """The arm of an engine with these arguments: `use_replayssm=true`."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())


def cell_order(cell: Cell) -> tuple[str, int, int, str]:
    """Sort key: by pair, then NWOR mode, then SCV mode, each in its declared order (off first);
    the A/A arm follows off x off; draft counts ascend, before the A/A arm."""
    drafts = cell.drafts
    arm = cell.arm or "" if drafts is None else f" {DRAFTS}{count_order(drafts):05d}"
    return (cell.pair, _NWOR_ORDER[cell.nwor_mode], _SCV_ORDER[cell.scv_mode], arm)


@lru_cache(maxsize=1024)
def recorded_cell(pair: str, nwor_mode: str, scv_mode: str, arm: str | None) -> Cell:
    """The cell of a record; the same object for equal names, since records are many and cells few.

    Raises ValueError for an unknown mode.
    """
    return Cell(pair, NworMode(nwor_mode), ScvMode(scv_mode), arm)
