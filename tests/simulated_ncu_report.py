"""A report as Nsight Compute's module `ncu_report` gives it."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nwor_bench.instruments.nsight.ncu import METRICS


@dataclass
class Metric:
    number: float | None
    named: str

    def value(self) -> float | None:
        return self.number

    def unit(self) -> str:
        return self.named


class Action:
    """One result of Nsight Compute, as its module gives it."""

    def __init__(
        self, ranges: tuple[tuple[str, int], ...] = (), **metrics: tuple[float | None, str]
    ) -> None:
        self._ranges = ranges
        self._metrics = {METRICS[name]: Metric(*value) for name, value in metrics.items()}

    def metric_by_name(self, name: str) -> Metric | None:
        return self._metrics.get(name)

    def nvtx_state(self) -> Any:
        """Another domain first, then ours."""
        return State(["NVTX", "nwor-bench"], self._ranges) if self._ranges else None


class State(list[str]):
    """Numbers of domains; here their names serve as such."""

    def __init__(self, names: list[str], ranges: tuple[tuple[str, int], ...]) -> None:
        super().__init__(names)
        self._ranges = ranges

    def domain_by_id(self, name: str) -> Any:
        own = [
            SimpleNamespace(
                name=lambda text=text: text,
                message=lambda: "",
                has_attributes=lambda: True,
                payload_as_uint64=lambda number=number: number if name == "nwor-bench" else 99,
            )
            for text, number in self._ranges
        ]
        return SimpleNamespace(
            name=lambda: name,
            push_pop_ranges=lambda: [text for text, _ in self._ranges],
            push_pop_range=lambda depth: own[depth],
        )


def report_of(*actions: Action) -> Any:
    return SimpleNamespace(load_report=lambda path: [list(actions)])
