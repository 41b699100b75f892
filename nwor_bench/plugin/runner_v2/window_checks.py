"""Which windows of a V2 runner the local gate checks, and their inputs.

A full CUDA graph runs no Python, so its layers cannot be traced. A checking graph is captured for
the gate, one for each draft count: the same forward, with copies of each layer's inputs and outputs
between its kernels. A checked window replays the graph that is timed, twice, and then the checking
one: if the model's output is the same in both of the first two, the third must equal them, bit for
bit. Recurrent states that a forward writes are put back before each further replay.
"""

from collections.abc import Collection
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.observe.layer_checks import LayerChecks, StepRows, StepTables, WindowTrace
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs
from nwor_bench.plugin.runner_v2.plan import WindowPlanner
from nwor_bench.plugin.runner_v2.setup import StagingParts
from nwor_bench.plugin.states import StateTables
from nwor_bench.plugin.window import Window


class GpuWindowChecks:
    """The windows of one worker that the local gate checks, from its start to its end."""

    def __init__(self, runner: Any, parts: StagingParts, whole: Collection[str]):
        self._runner = runner
        self._parts = parts
        self._checks = LayerChecks(parts.layers, parts.staging, parts.states, whole)
        self._sets = dict[tuple[bool, Any], tuple[StagingGraphs, WindowPlanner, WindowTrace]]()
        self._metadata: dict[str, Any] = {}
        self._path: str | None = None
        self._graph: tuple[bool, Any] | None = None
        self._input_batch: Any = None
        self._hidden: dict[str, int] | None = None
        self._needed = 0
        """Bytes that two copies of the states of the window in flight take, if there is no room."""
        self._patch = Patch(runner.model_state, "prepare_attn", self._wrap_prepare_attn)
        self._patch.apply()

    def _wrap_prepare_attn(self, original: Any) -> Any:
        def prepare_attn(*args: Any, **kwargs: Any) -> Any:
            metadata = original(*args, **kwargs)
            if isinstance(metadata, dict):
                self._metadata = metadata
            return metadata

        return prepare_attn

    def prepare(self, requests: int, control: bool) -> None:
        """Capture this mode's checking graph of each draft count, between batches."""
        timed = self._parts.control_graphs if control else self._parts.graphs
        smallest = dict[int | None, Any]()
        for desc in sorted(timed.shapes, key=lambda desc: desc.num_tokens):
            if (desc.num_reqs or 0) >= requests:
                smallest.setdefault(desc.uniform_token_count, desc)
        for desc in smallest.values():
            if (control, desc) in self._sets:
                continue
            graphs, planner = self._parts.plan(control)
            graphs.only, trace = desc, WindowTrace()
            self._checks.follow(trace)
            began = perf_counter()
            try:
                graphs.capture()
            finally:
                self._checks.follow(None)
                self._checks.spent_s += perf_counter() - began
            self._sets[control, desc] = graphs, planner, trace

    def stop(self, validator: Any) -> None:
        """Drop the checking graphs and every launch that is bound to them."""
        self._patch.undo()
        for graphs, *_ in self._sets.values():
            for batch in graphs.shapes.values():
                validator.forget(batch.sources)
            graphs.give_up("checked")
        self._sets.clear()
        for layer_set in self._parts.staging.sets:
            layer_set.forget_launches()

    def take(self) -> list[dict[str, Any]]:
        """Measurements of the windows that were checked since the last call."""
        return self._checks.take()

    def planner(self, usual: WindowPlanner, control: bool, descriptor: Any) -> WindowPlanner:
        """Choose whether the window that begins is checked; the planner for it."""
        mode = "NONE" if descriptor is None else descriptor.cg_mode.name
        self._path, self._graph = None, None
        if mode == "FULL":
            of_graph = self._sets.get((control, descriptor))
            if of_graph is None or descriptor not in of_graph[0].shapes:
                return usual
            if self._checks.wants("full graph", (control, descriptor)):
                self._path, self._graph = "full graph", (control, descriptor)
                _, planner, self._checks.trace = of_graph
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
            self._checks.trace = WindowTrace()
            self._checks.follow(self._checks.trace)
        slots = slot_mappings[chosen][..., : input_batch.num_tokens].clone()
        of_layer = {
            layer.name: slots if slots.dim() == 1 else slots[layer.slot_row]
            for layer in self._parts.staging.layers
        }
        starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1].tolist()
        self._input_batch, self._hidden, self._needed = input_batch, None, 0
        self._checks.begin(StepRows(starts, drafts, of_layer, path, self._graph))

    def replay(self, timed: StagingGraphs, control: bool, desc: Any) -> Any:
        """Run a captured window: if it is checked, the timed graph twice, then the checking one."""
        if self._path != "full graph":
            return timed.replay(desc)
        graphs, states = self._sets[control, desc][0], self._states_written()
        if states is None:
            return graphs.replay(desc)
        outputs = []
        for replayed in (timed, timed, graphs):
            for cache, slots, before in states:
                cache[slots] = before
            output = replayed.replay(desc)
            outputs.append(_hidden(output).clone())
        (first, second, checking), rows = outputs, self._input_batch.num_tokens
        self._hidden = {
            "repeated": int((first[:rows] != second[:rows]).sum()),
            "checking": int((first[:rows] != checking[:rows]).sum()),
        }
        return output

    def _states_written(self) -> list[tuple[Tensor, Tensor, Tensor]] | None:
        """Caches of recurrent layers that the forward writes, the window's slots and what is there;
        None without twice the room for copies. A staged layer writes its convolution's only."""
        batch, written = self._parts.window.batch, list[tuple[Tensor, Tensor]]()
        staged = isinstance(getattr(batch, "states", None), StateTables)
        for name, layer in self._parts.recurrent.items():
            tables = [
                entry.flatten()
                for field, entry in vars(self._metadata[name]).items()
                if "state_indices" in field and isinstance(entry, Tensor)
            ]
            slots = torch.unique(torch.cat(tables)).long()
            caches = layer.kv_cache[:1] if staged else layer.kv_cache
            written += [(cache, slots[slots >= 0]) for cache in caches]
        size, device = sum(c[0].nbytes * len(slots) for c, slots in written), self._runner.device
        if written and device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * size:
            self._needed = 2 * size
            return None
        return [(cache, slots, cache[slots]) for cache, slots in written]

    def end(self, window: Window, num_sampled: Tensor) -> None:
        """The window is committed, or fell back; its K/V are still held."""
        path, self._path = self._path, None
        self._checks.follow(None)
        if path is None:
            return
        counts = num_sampled[: self._input_batch.num_reqs].tolist()
        if self._checks.ended(window, counts, self._tables):
            self._checks.windows[-1] |= {"graphs": self._hidden, "copies_need": self._needed}

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
