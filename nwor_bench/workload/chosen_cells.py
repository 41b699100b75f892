"""Cells of the grid that a user chooses, by name, and those that are added by themselves."""

from enum import StrEnum
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.workload.option_text import parse_as


class CellName(StrEnum):
    """A cell of the grid, by its modes, as --cells names it."""

    OFF_GRAPH = "off-graph"
    OFF_ADAPTIVE = "off-adaptive"
    STAGE_OFF = "stage-off"
    STAGE_GRAPH = "stage-graph"
    STAGE_ADAPTIVE = "stage-adaptive"

    @property
    def modes(self) -> tuple[NworMode, ScvMode]:
        """Its NWOR and SCV mode."""
        nwor, scv = self.split("-")
        return NworMode(nwor), ScvMode(scv)


def added_cell(word: object) -> str | None:
    """What to write instead of a cell that is added and never chosen; None for other words."""
    if word == "off-off":
        return "off x off and its A/A arm are added by themselves; write a cell such as stage-graph"
    if isinstance(word, str) and word.startswith("control-"):
        return (
            "control x off is added by itself beside a staging cell on a GPU, and anywhere with "
            "control among the NWOR modes; write a cell such as stage-graph"
        )
    return None


def cell_words(flag: str, given: Any) -> Any:
    """The words of `flag`, as they are; raises ConfigError for a cell that is added."""
    words = parse_as(tuple[str, ...], flag, given)
    for word in words:
        if (remedy := added_cell(word)) is not None:
            raise ConfigError.for_field(flag, word, remedy)
    return words
