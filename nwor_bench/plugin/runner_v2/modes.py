"""Which attention and CUDA graphs are in place on a V2 runner, in each mode and between windows."""

from typing import Any

from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs
from nwor_bench.plugin.runner_v2.setup import StagingParts
from nwor_bench.records.types import NworMode


class StagingModes:
    """Switches the target layers between stock's methods and ours, and captures our graphs.

    Args:
        parts: staging for the runner.
        vote: of the ranks; each capture needs one.
    """

    def __init__(self, parts: StagingParts, vote: RankVote):
        self._parts = parts
        self._vote = vote

    def switch(self, nwor_mode: NworMode) -> str | None:
        """Put a mode's attention in place; staging captures its graphs the first time.

        In mode off the target layers are the stock objects again.

        Returns:
            Why staging stops on every rank, for lack of memory; None: it does not.
        """
        if nwor_mode is NworMode.OFF:
            self.patch(False)
            return None
        reason = self._vote.settle(self._parts.staging.allocate())
        if reason is not None:
            self.patch(False)
            return reason
        self.patch(True)
        self._capture(self.graphs_of(nwor_mode is NworMode.CONTROL))
        return None

    def graphs_of(self, control: bool) -> StagingGraphs:
        """The graphs of mode control, or of mode stage."""
        return self._parts.control_graphs if control else self._parts.graphs

    def patch(self, patched: bool) -> None:
        """Wrap the target layers' attention, or restore the stock methods."""
        if self._parts.attention.applied is patched:
            return
        if patched:
            self._parts.attention.apply()
        else:
            self._parts.attention.undo()

    def prepare_sham(self) -> str | None:
        """Capture stock's forward once more; why windows of a sham run as plain off, or None."""
        self.patch(False)
        self._capture(self._parts.sham_graphs)
        return self._parts.sham_graphs.unavailable

    def _capture(self, graphs: StagingGraphs) -> None:
        graphs.capture()
        graphs.give_up(self._vote.settle(graphs.unavailable))


def graph_facts(stock: Any, parts: StagingParts | None) -> dict[str, Any]:
    """Sizes of vLLM's graph set and of ours, which must be equal, and the memory of ours.

    Args:
        stock: the runner's graph manager; None without CUDA graphs.
        parts: staging for the runner; None if nothing can be staged.
    """
    facts: dict[str, Any] = {"mode": None if stock is None else stock.cudagraph_mode.name}
    graphs = parts.graphs if parts else None
    facts["stock_window_sizes"] = (
        sorted(desc.num_tokens for desc in graphs.wanted()) if graphs else []
    )
    facts["stage_window_sizes"] = graphs.capture_sizes if graphs else []
    for name, each in (
        ("stage", graphs),
        ("control", parts.control_graphs if parts else None),
        ("sham", parts.sham_graphs if parts else None),
    ):
        facts[f"{name}_memory_bytes"] = each.memory_bytes if each else None
        facts[f"{name}_unavailable"] = each.unavailable if each else None
    sham = parts.sham_graphs if parts else None
    facts["sham_window_sizes"] = sham.capture_sizes if sham else []
    facts["sham_capture_s"] = sham.capture_s if sham else None
    return facts
