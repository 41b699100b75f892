"""Effect of holding all layers' K/V, and nothing else, on DRAM bytes of eager stock vLLM.

    python sweeps/studies/dram-bytes/measure_held.py --requests 64 --draft-tokens 8 --output DIR

Staging by reference holds every layer's K/V until the commit, so that in an eager engine the
allocator gives each layer other memory, where stock reuses a layer's for the next. Here the A/A arm
of a run like `measure.py --eager`'s holds them until the next step's first layer (a prefill's too,
which staging does not), and stages nothing; no cell does. README.md shows what that adds beside
what stays unexplained.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import add_run_arguments, run_kind

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.instruments.cupti_library import run_under_own_cupti
from nwor_bench.records.types import Cell


class HoldingEngine(VllmEngine):
    """Stock vLLM, whose attention holds K and V in the A/A arm."""

    _layers: "list[Any] | None" = None
    _held: "list[Any] | None" = None

    def set_modes(self, cell: Cell) -> None:
        """Switch, and hold or let go."""
        super().set_modes(cell)
        for layer in self._attention():
            vars(layer).pop("forward", None)
        self._held = []
        if cell.arm is not None:
            self._hold(self._held)

    def _attention(self) -> list[Any]:
        """The target layers' attention, in their order."""
        if self._layers is None:
            core = self._llm.llm_engine.engine_core.engine_core
            worker = core.model_executor.driver_worker.worker
            context = worker.model_runner.vllm_config.compilation_config.static_forward_context
            self._layers = [context[name].impl for name in worker.nwor_hook.target_layers]
        return self._layers

    def _hold(self, held: list[Any]) -> None:
        layers = self._attention()
        for layer in layers:
            layer.forward = holding(layer.forward, held, layer is layers[0])


def holding(stock: Callable[..., Any], held: list[Any], is_first: bool) -> Callable[..., Any]:
    """Attention that holds its K and V; the first layer's lets those of the last step go."""

    def forward(*args: Any, **more: Any) -> Any:
        if is_first:
            held.clear()
        held.append(args[2:4])  # of layer, query, key, value, ...
        return stock(*args, **more)

    return forward


def both_off(cell: Cell) -> bool:
    """off x off and its A/A arm."""
    return cell.is_baseline or cell.arm is not None


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    parser.set_defaults(eager=True, output=Path("runs"))
    arguments = parser.parse_args()
    run_under_own_cupti()
    arguments.output.mkdir(parents=True, exist_ok=True)
    run_kind(arguments, "reference", "eager-hold", both_off, HoldingEngine)


if __name__ == "__main__":
    main()
