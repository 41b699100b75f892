"""The engine that all runs of a group share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nwor_bench.engine.protocol import Engine
from nwor_bench.run.execute import EngineFactory, EngineSource, Prepared
from nwor_bench.workload.config import RunSpec


class GroupEngine:
    """Started by the first run that asks for it; after `close` the next one gets a new engine.

    Args:
        factory: starts an engine.
        spec: the group's configuration, with room for its largest run.
    """

    def __init__(self, factory: EngineFactory, spec: RunSpec):
        self._factory = factory
        self._spec = spec
        self._engine: Engine | None = None

    def source(self, prepared: Prepared) -> EngineSource:
        """The engine for `run_prepared`; it outlives the run."""

        @contextmanager
        def engine(log: Path | None) -> Iterator[Engine]:
            if self._engine is None:
                self._engine = self._factory(prepared.pair, self._spec, log)
            yield self._engine

        return engine

    def close(self) -> None:
        """Close the engine, if there is one: after a failed batch its state may be inconsistent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
