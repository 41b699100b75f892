"""A DRAM for simulated windows: it holds real values and counts what crosses its border."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Dram:
    """Memory that counts bytes; `cells` may be looked at and set without traffic."""

    cells: dict[Hashable, Any] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0

    def read(self, place: Hashable, size: int) -> Any:
        self.read_bytes += size
        return self.cells[place]

    def write(self, place: Hashable, value: Any, size: int) -> None:
        self.written_bytes += size
        self.cells[place] = value
