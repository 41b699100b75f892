"""A cell: a pair of models, an NWOR mode, an SCV mode and an arm."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

SHAM = "sham"
"""What the A/A arm runs in an interleaved batch: off, switched to as stage is."""

SWITCHED = "switched"
"""A sham's windows that ran as such; other counts are by the reason for which they did not."""


class Adaptive(StrEnum):
    """The draft count that is no number: vLLM decides in each step how many of the most drafts a
    request verifies."""

    ADAPTIVE = "adaptive"


ADAPTIVE: Final = Adaptive.ADAPTIVE


@dataclass(frozen=True)
class MethodCount:
    """A draft count of one of several methods that a run compares: `eagle3 k=2`. With 0, which is
    false as the number is, the drafter is loaded and drafts nothing: not plain decoding."""

    method: str
    """The method's name in the run (--arm)."""
    number: int

    def __str__(self) -> str:
        return f"{self.method} {_DRAFTS}{self.number}"

    def __bool__(self) -> bool:
        return self.number > 0


Fixed = int | MethodCount
"""A number of drafts, all of which are verified."""

Count = Fixed | Adaptive
"""Drafts per request and window. In tables `2`, `eagle3 k=2` or `adaptive`, by `str`."""

ADAPTIVE_VERIFICATION = "enable_adaptive_verification"
"""What switches it on in vLLM's speculative_config."""

_DRAFTS = "k="
_METHOD_COUNT = re.compile(rf"([\w.-]+) {_DRAFTS}(\d+)")


class Special(StrEnum):
    """Arms that stand for themselves."""

    AA = "A/A"
    """The second off x off: its difference from the first is noise."""

    INTERLEAVED = "interleaved"
    """What a check found in an interleaved batch, which is no cell's own."""


AA, INTERLEAVED = Special


@dataclass(frozen=True)
class Drafts:
    """The arm of a cell that runs a number of drafts of its own: `k=0`, `k=adaptive`, `mtp k=2`."""

    count: Count

    def __str__(self) -> str:
        return str(self.count) if isinstance(self.count, MethodCount) else f"{_DRAFTS}{self.count}"


@dataclass(frozen=True)
class Arguments:
    """The arm of an engine with further arguments: `use_replayssm=true`."""

    text: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Arguments":
        """The arm of an engine with these arguments."""
        return cls(", ".join(f"{name}={json.dumps(value)}" for name, value in values.items()))

    def __str__(self) -> str:
        return self.text


Arm = Special | Drafts | Arguments
"""What sets a cell apart from others of its modes."""


def read_arm(text: str | None) -> Arm | None:
    """The arm that a record writes as `str(arm)`. Raises ValueError for a count that is none."""
    if text is None or text in tuple(Special):
        return None if text is None else Special(text)
    if text.startswith(_DRAFTS):
        count = text.removeprefix(_DRAFTS)
        return Drafts(ADAPTIVE if count == ADAPTIVE else int(count))
    found = _METHOD_COUNT.fullmatch(text)
    return Drafts(MethodCount(found[1], int(found[2]))) if found else Arguments(text)


def engine_name(arm: Arm | None) -> str:
    """The name of the models that the arm's engine runs: its method's if a run has several."""
    count = arm.count if isinstance(arm, Drafts) else None
    return count.method if isinstance(count, MethodCount) else str(arm)


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

    arm: Arm | None = None
    """AA for the second reference, which is run and compared like any other cell so that the run
    shows its own noise floor; the draft count of a cell that has one; the arguments of `--against`
    for the engine that has them; else None."""

    @classmethod
    def from_names(cls, names: Mapping[str, Any]) -> "Cell":
        """The cell that an event names (see `names`). Raises ValueError for an unknown mode."""
        modes = NworMode(names["nwor_mode"]), ScvMode(names["scv_mode"])
        return cls(names["pair"], *modes, read_arm(names.get("arm")))

    @property
    def is_baseline(self) -> bool:
        """True for the cell against which every other one is compared: off x off, or k = 0."""
        off = self.nwor_mode is NworMode.OFF and self.scv_mode is ScvMode.OFF
        return off and self.arm in (None, Drafts(0))

    @property
    def drafts(self) -> Count | None:
        """Drafts per request and window if the cell has a count of its own; else None."""
        return self.arm.count if isinstance(self.arm, Drafts) else None

    @property
    def fixed_drafts(self) -> int:
        """`drafts`, all of which are verified; 0 for a cell without such a count."""
        return number_of(self.drafts)

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
    def names(self) -> dict[str, Any]:
        """The cell in an event of the records."""
        return {
            "pair": self.pair,
            "nwor_mode": str(self.nwor_mode),
            "scv_mode": str(self.scv_mode),
            "arm": None if self.arm is None else str(self.arm),
        }


def label_of(nwor_mode: str, scv_mode: str, arm: Arm | None) -> str:
    """A cell's name for people: `stage x graph`, `off x off (A/A)`, `k = 2, stage x off`."""
    if isinstance(arm, Drafts):
        staged = "" if nwor_mode == NworMode.OFF else f", {nwor_mode} x {scv_mode}"
        return f"{arm if isinstance(arm.count, MethodCount) else f'k = {arm.count}'}{staged}"
    return f"{nwor_mode} x {scv_mode}" + (f" ({arm})" if arm else "")


def fixed_counts(counts: Iterable[Count]) -> list[Fixed]:
    """The counts but ADAPTIVE."""
    return [count for count in counts if count is not ADAPTIVE]


def number_of(drafts: Count | None) -> int:
    """The number of drafts; 0 if it is not fixed."""
    if isinstance(drafts, MethodCount):
        return drafts.number
    return drafts if isinstance(drafts, int) else 0


def method_of(drafts: Count | None) -> str | None:
    """The count's method if a run has several; else None, as for plain decoding."""
    return drafts.method if isinstance(drafts, MethodCount) else None


def count_order(drafts: Count) -> str:
    """Sort key of draft counts: ascending, behind numbers ADAPTIVE and each method's, as digits
    come before letters."""
    if isinstance(drafts, MethodCount):
        return f"{drafts.method} {drafts.number:05}"
    return str(drafts).zfill(5)


def cell_order(cell: Cell) -> tuple[str, int, int, str]:
    """Sort key: by pair, then NWOR mode, then SCV mode, each in its declared order (off first);
    the A/A arm follows off x off; draft counts ascend, before the A/A arm."""
    drafts = cell.drafts
    arm = str(cell.arm or "") if drafts is None else f" {count_order(drafts)}"
    return (cell.pair, _NWOR_ORDER[cell.nwor_mode], _SCV_ORDER[cell.scv_mode], arm)


@lru_cache(maxsize=1024)
def recorded_cell(pair: str, nwor_mode: str, scv_mode: str, arm: str | None) -> Cell:
    """The cell of a record; the same object for equal names, since records are many and cells few.

    Raises ValueError for an unknown mode.
    """
    return Cell(pair, NworMode(nwor_mode), ScvMode(scv_mode), read_arm(arm))
