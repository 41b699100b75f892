"""Which windows of a V2 runner the local gate checks, and their inputs.

A full CUDA graph runs no Python, so its layers cannot be traced. A checking graph is captured for
the gate, one for each draft count: the same forward, with copies of each layer's inputs and outputs
between its kernels. A checked window replays the graph that is timed, twice, and then the checking
one: if the model's output is the same in both of the first two, the third must equal them, bit for
bit. Recurrent states that a forward writes are put back before each further replay.
"""

from collections.abc import Collection
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.observe.layer_checks import LayerChecks, StepRows, StepTables
from nwor_bench.plugin.observe.state_checks import check_states
from nwor_bench.plugin.observe.state_trace import StateTrace
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs
from nwor_bench.plugin.runner_v2.plan import WindowPlanner
from nwor_bench.plugin.runner_v2.setup import StagingParts
from nwor_bench.plugin.states import StateTables
from nwor_bench.plugin.window import LayerTrace, Window

ROOM = 2
"""A GPU must have this many times the memory of the states that are put back free."""


class WindowChecks:
    """The windows of one worker that the local gate checks, from its start to its end."""

    def __init__(self, runner: Any, parts: StagingParts, whole: Collection[str]):
        self._runner = runner
        self._parts = parts
        self._checks = LayerChecks(parts.layers, whole)
        self._sets: dict[
            tuple[bool, Any], tuple[StagingGraphs, WindowPlanner, LayerTrace, StateTrace]
        ] = {}
        self._states = StateTrace()
        self._metadata: dict[str, Any] = {}
        self._path: str | None = None
        self._graph: tuple[bool, Any] | None = None
        self._input_batch: Any = None
        self._hidden: dict[str, int] | None = None
        self._patch = Patch(runner.model_state, "prepare_attn", self._wrap_prepare_attn)
        self._patch.apply()

    def _wrap_prepare_attn(self, original: Any) -> Any:
        def prepare_attn(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if isinstance(found, dict):
                self._metadata = found
            return found

        return prepare_attn

    def prepare(self, requests: int, control: bool) -> None:
        """Capture this mode's checking graph of each draft count, between batches."""
        timed = self._parts.control_graphs if control else self._parts.graphs
        shapes = [desc for desc in timed.shapes if (desc.num_reqs or 0) >= requests]
        shapes.sort(key=lambda desc: (desc.uniform_token_count or 0, desc.num_tokens))
        for _, alike in groupby(shapes, key=lambda desc: desc.uniform_token_count):
            smallest = next(alike)
            if (control, smallest) not in self._sets:
                self._capture(control, smallest)

    def _capture(self, control: bool, descriptor: Any) -> None:
        graphs, planner = self._parts.plan(control)
        graphs.only = descriptor
        trace, states = LayerTrace(), StateTrace()
        self._set_trace(trace, states)
        began = perf_counter()
        try:
            graphs.capture()
        finally:
            self._set_trace(None, None)
            self._checks.spent_s += perf_counter() - began
        self._sets[control, descriptor] = graphs, planner, trace, states

    def _set_trace(self, trace: LayerTrace | None, states: StateTrace | None) -> None:
        self._parts.staging.trace = trace
        self._checks.follow(trace)
        if self._parts.states is not None:
            self._parts.states.follow(states)

    def stop(self, validator: Any) -> None:
        """Drop the checking graphs and every launch that is bound to them."""
        self._patch.undo()
        for graphs, *_ in self._sets.values():
            for batch in graphs.shapes.values():
                validator.forget(batch.sources)
            graphs.give_up("checked")
        self._sets.clear()
        for each in self._parts.staging.sets:
            each.forget_launches()

    def take(self) -> list[dict[str, Any]]:
        """Measurements of the windows that were checked since the last call."""
        return self._checks.take()

    def planner(self, usual: WindowPlanner, control: bool, descriptor: Any) -> WindowPlanner:
        """Choose whether the window that begins is checked; the planner for it."""
        mode = "NONE" if descriptor is None else descriptor.cg_mode.name
        self._path = self._graph = None
        if mode == "FULL":
            graph = control, descriptor
            of_graph = self._sets.get(graph)
            if of_graph is None or descriptor not in of_graph[0].shapes:
                return usual
            if self._checks.wants("full graph", graph):
                self._graph = graph
                self._path = "full graph"
                _, planner, self._checks.trace, self._states = of_graph
                return planner
            return usual
        path = "piecewise" if mode == "PIECEWISE" else "eager"
        self._path = path  # `begin` decides: it sees whether a prefill runs beside
        return usual

    def begin(self, input_batch: Any, slot_mappings: Tensor, chosen: Any) -> None:
        """The window is open and its forward comes next.

        Args:
            slot_mappings: [groups, rows] int64.
            chosen: index of the target layers' slots in them.
        """
        path = self._path
        if path is None:
            return
        drafts = input_batch.num_draft_tokens_per_req.tolist()
        if path != "full graph":
            alone = input_batch.num_tokens == sum(drafts) + input_batch.num_reqs
            path = path if alone else f"{path}, beside prefill"
            if not self._checks.wants(path):
                self._path = None
                return
            self._checks.trace, self._states = LayerTrace(), StateTrace()
            self._set_trace(self._checks.trace, self._states)
        slots = slot_mappings[chosen][..., : input_batch.num_tokens].clone()
        of_layer = {
            layer.name: slots if slots.dim() == 1 else slots[layer.slot_row]
            for layer in self._parts.staging.layers
        }
        starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1].tolist()
        self._input_batch, self._hidden = input_batch, None
        self._checks.begin(StepRows(starts, drafts, of_layer, path, self._graph))

    def replay(self, timed: StagingGraphs, control: bool, desc: Any) -> Any:
        """Run a captured window: if it is checked, the timed graph twice, then the checking one."""
        if self._path != "full graph":
            return timed.replay(desc)
        graphs, states = self._sets[control, desc][0], self._states_written()
        if states is None:
            return graphs.replay(desc)
        found = []
        for _ in range(2):
            found.append(_hidden(timed.replay(desc)).clone())
            for cache, slots, before in states:
                cache[slots] = before
        output = graphs.replay(desc)
        (first, second), rows = found, self._input_batch.num_tokens
        self._hidden = {
            "repeated": int((first[:rows] != second[:rows]).sum()),
            "checking": int((first[:rows] != _hidden(output)[:rows]).sum()),
        }
        return output

    def _states_written(self) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """Caches of recurrent layers that the forward writes, the window's slots and what is there;
        None if the device has no room for copies. A staged layer writes its convolution's only."""
        batch, found = self._parts.window.batch, list[tuple[Tensor, Tensor]]()
        staged = isinstance(getattr(batch, "states", None), StateTables)
        for name, layer in self._parts.recurrent.items():
            tables = [
                each.flatten()
                for field, each in vars(self._metadata[name]).items()
                if "state_indices" in field and isinstance(each, Tensor)
            ]
            slots = torch.unique(torch.cat(tables)).long()
            caches = layer.kv_cache[:1] if staged else layer.kv_cache
            found += [(cache, slots[slots >= 0]) for cache in caches]
        size = sum(cache[0].nbytes * len(slots) for cache, slots in found)
        device = self._runner.device
        if found and device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < ROOM * size:
            return None
        return [(cache, slots, cache[slots]) for cache, slots in found]

    def end(self, window: Window, num_sampled: Tensor) -> None:
        """The window is committed, or fell back; its K/V are still held."""
        path, self._path = self._path, None
        self._set_trace(None, None)
        if path is None:
            return
        counts = num_sampled[: self._input_batch.num_reqs].tolist()
        if not self._checks.ended(window, counts, self._tables):
            return
        found = self._checks.windows[-1]
        found["graphs"] = self._hidden
        if self._parts.states is not None:
            layers, control = self._parts.states.layers, window.is_control
            found["layers"] += check_states(layers, self._states, counts, is_control=control)

    def _tables(self) -> dict[str, StepTables]:
        inputs, requests = self._parts.inputs, self._input_batch.num_reqs
        return {
            name: StepTables(*inputs.tables(name, requests), self._metadata[name])
            for name in (layer.name for layer in self._parts.layers)
        }


def _hidden(output: Any) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, torch.Tensor)
    return hidden
