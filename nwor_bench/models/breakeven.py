"""The break-even map: predicted saving over acceptance x batch, for several k and contexts."""

from dataclasses import dataclass, replace

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.strategies import DIRECT, STRATEGIES, Strategy

MAPPED = tuple(strategy for strategy in STRATEGIES if strategy is not DIRECT)

_ACCEPTANCES = tuple(number / 20 for number in range(21))
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_DRAFT_TOKENS = (1, 2, 3, 4, 5, 8, 16)
_CONTEXTS = (128, 1024, 4096, 16384, 65536, 131072)


@dataclass(frozen=True)
class BreakEvenMap:
    """Axes of the map, with the workload in question among their values."""

    model: ByteModel
    load: Workload
    acceptances: tuple[float, ...]
    requests: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    contexts: tuple[int, ...]

    def shares(self, strategy: Strategy, draft_tokens: int, context: int) -> list[list[float]]:
        """Saving as a fraction of the step's DRAM bytes: a row a batch size, a value an acceptance.

        Positive where the strategy moves fewer bytes than direct.
        """
        load = replace(self.load, draft_tokens=draft_tokens, context=context)
        return [self._row(strategy, replace(load, requests=number)) for number in self.requests]

    def _row(self, strategy: Strategy, load: Workload) -> list[float]:
        step = self.model.step(load)  # of direct, so the same for every acceptance
        loads = (replace(load, acceptance=acceptance) for acceptance in self.acceptances)
        return [self.model.saved(strategy, each) / step for each in loads]


def break_even_map(model: ByteModel, load: Workload) -> BreakEvenMap:
    """The map around `load`."""
    return BreakEvenMap(
        model,
        load,
        acceptances=_ACCEPTANCES,
        requests=tuple(sorted({*_REQUESTS, load.requests})),
        draft_tokens=tuple(sorted({*_DRAFT_TOKENS, load.draft_tokens})),
        contexts=tuple(sorted({*_CONTEXTS, load.context})),
    )
