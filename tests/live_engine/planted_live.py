"""Faults planted into a running server's worker, through its worker extension."""

from dataclasses import replace
from typing import Any

from nwor_bench.plugin.attaching import HOOK
from nwor_bench.plugin.runner_v1 import staging
from nwor_bench.plugin.worker import NworWorkerExtension


class PlantedWorker(NworWorkerExtension):
    """Can be told to go wrong once."""

    def plant(self, name: str, rank: int = 0) -> None:
        """Plant one of the faults below into the next staged window of one rank."""
        if self.rank != rank:  # type: ignore[attr-defined]
            return
        getattr(self, f"_{name}")(getattr(self, HOOK))

    def _refused_commit(self, hook: Any) -> None:
        original = hook.buffers.commit

        def commit(*_: Any) -> str:
            hook.buffers.commit = original
            return "planted"

        hook.buffers.commit = commit

    def _device_refusal(self, hook: Any) -> None:
        hook.refusals.errors.fill_(1)  # only the flag: the commits themselves are right

    def _no_commit(self, hook: Any) -> None:
        """Every commit from now on writes nothing, and says nothing of it."""
        if hook.name == "V1":
            staging.commit_windows_reference = lambda *_, **__: None
            return
        hook.buffers._launch = lambda *_: lambda counts: None
        hook.validator._graphs.clear()

    def _miscount(self, hook: Any) -> None:
        original = hook.accumulator.add

        def add(counts: Any, *given: Any) -> None:
            if counts.staged_tokens:
                hook.accumulator.add = original
                counts = replace(counts, rejected_tokens=counts.rejected_tokens + 1)
            original(counts, *given)

        hook.accumulator.add = add
