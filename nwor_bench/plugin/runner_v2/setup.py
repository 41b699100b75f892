"""Staging on a GPU set up for one runner, or why its windows must be written directly."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode

from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.plugin import refusals
from nwor_bench.plugin.layers import (
    LayerCache,
    SlotRows,
    StagingUnavailable,
    TargetLayers,
    is_latent,
    rows_of,
    set_up,
    slot_rows,
)
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v2 import attention_layers, mla_attention
from nwor_bench.plugin.runner_v2.attention import AttentionGroup, StagingAttention
from nwor_bench.plugin.runner_v2.attention_choice import (
    AttentionChoices,
    AttentionKind,
    AttentionShape,
    ChoiceStore,
    kernels_digest,
)
from nwor_bench.plugin.runner_v2.attention_decision import Contender
from nwor_bench.plugin.runner_v2.committed import CommittedOnly, decode_shortened, without_mask
from nwor_bench.plugin.runner_v2.gated_delta import set_up_states, state_patches
from nwor_bench.plugin.runner_v2.graph_sets import ControlGraphs, StagingGraphs, StockGraphs
from nwor_bench.plugin.runner_v2.mla_attention import MlaStagingAttention
from nwor_bench.plugin.runner_v2.plan import WindowPlanner, memory_of, most_referenced_rows
from nwor_bench.plugin.runner_v2.staged_layer import StepInputs
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.window import Window
from nwor_bench.records.types import AttentionBy, NworMode, StageBy
from nwor_kernels.mla_verify_attention.kernel import create_workspace
from nwor_kernels.verify_attention.kernel import VerifyWorkspace
from nwor_kernels.verify_attention.tuning import processors_of

logger = logging.getLogger("vllm.nwor_bench")

COMMIT_S = 6e-6
"""A commit of all layers, measured on an H200: what staging adds to a window's attention."""

FORCED = {
    AttentionBy.AUTO: None,
    AttentionBy.OURS: Contender.OURS,
    AttentionBy.MERGE: Contender.MERGE,
    AttentionBy.STOCK: None,
}


class StagingParts:
    """Staging for one runner.

    Raises:
        StagingUnavailable: windows are written directly; the message is the fallback reason.
    """

    def __init__(self, runner: Any, target: TargetLayers, settings: PluginSettings):
        names = [*target.staged, *target.sharing]
        self._runner, self._length = runner, runner.num_speculative_steps + 1
        context = runner.compilation_config.static_forward_context
        reason = lost(Feature.STAGING) or refusals.of_runner(runner)
        reason = reason or refusals.of_target(runner, target, self._why_no_kernel)
        if reason:
            raise StagingUnavailable(reason)
        slots = slot_rows(runner, target.staged)
        caches = target_caches(runner, target.staged, slots)
        most_drafts = runner.max_num_reqs * runner.num_speculative_steps
        self.staging = GpuStaging(caches, most_drafts, grouped=slots.several)
        self.window = Window(self.staging)
        self.states, self.states_unavailable = set_up_states(
            runner, target, self.window, memory_of(runner.device)
        )
        self.inputs = StepInputs(runner, names)
        self.slots = slots.chosen
        """Index of the target layers' slots in the runner's (`SlotRows.chosen`)."""
        self.recurrent = {name: context[name] for name in target.recurrent}
        """The target's recurrent layers: a forward that runs again starts from their states."""
        self._copied = settings.stage_by is StageBy.COPY
        self.attention_by = settings.attention
        self._groups: dict[tuple[AttentionShape, int], AttentionGroup] = {}
        self._kinds: dict[AttentionShape, AttentionKind] = {}
        self.choices = self._choices(target)
        """What attends windows, and which are left to stock."""
        layers, memory = [context[name] for name in target.staged], memory_of(runner.device)
        self._most_referenced = most_referenced_rows(layers, runner.dtype.itemsize, memory)
        self.graphs, self.planner = self.plan(control=False)
        """Graphs and planner of mode `stage`."""
        self.control_graphs, self.control_planner = self.plan(control=True)
        """Graphs and planner of mode `control`."""
        self.sham_graphs = StockGraphs(runner, self.window, self.staging, self.inputs, self.slots)
        """Stock's forward captured once more, for the A/A arm."""
        self.layers = self._staged_layers(target)
        """The target layers' `StagedLayer`s."""
        self.attention = PatchSet(self._patches())
        """Applied in modes `stage` and `control`."""

    def _why_no_kernel(self, layer: Any) -> str | None:
        return _module_of(layer).why_no_kernel(layer, self._length, self._runner.dtype)

    def plan(self, control: bool) -> tuple[StagingGraphs, WindowPlanner]:
        """A further, empty set of full CUDA graphs and its planner, for mode control or stage."""
        runner = self._runner
        around = (self.window, self.staging, self.inputs, self.slots)
        kind = ControlGraphs if control else StagingGraphs
        graphs = kind(runner, *around, self._copied, self.choices, self.states)
        return graphs, WindowPlanner(
            self._length,
            self.slots,
            runner.max_num_reqs,
            graphs,
            runner.device,
            self._copied,
            most_referenced=self._most_referenced,
            breakable=refusals.breaks_piecewise_graphs(runner.cudagraph_manager),
        )

    def _choices(self, target: TargetLayers) -> AttentionChoices:
        context = self._runner.compilation_config.static_forward_context
        counts: dict[AttentionShape, int] = {}
        for name in (*target.staged, *target.sharing):
            layer = context[name]
            of_kind = _module_of(layer)
            shape = of_kind.shape_of(layer, self._runner.dtype)
            counts[shape] = counts.get(shape, 0) + 1
            if shape not in self._kinds:
                self._kinds[shape] = AttentionKind(
                    shape, processors_of(self._runner.device), can_merge=of_kind.merges(layer),
                    forced=FORCED[self.attention_by],
                )  # fmt: skip
        kinds = [(self._kinds[shape], count) for shape, count in counts.items()]
        return AttentionChoices(kinds, stock_only=self.attention_by is AttentionBy.STOCK)

    def _group_of(self, layer: Any, table: int, workspace: VerifyWorkspace) -> AttentionGroup:
        runner = self._runner
        shape = _module_of(layer).shape_of(layer, runner.dtype)
        if (shape, table) not in self._groups:
            kind, committed = self._kinds[shape], None
            if kind.can_merge:
                shortened = decode_shortened if shape.latent else without_mask(layer)
                around = (self.inputs, runner.max_num_reqs, runner.device)
                committed = CommittedOnly(*around, shortened)
            group = AttentionGroup(kind, workspace, runner.device, committed)
            self._groups[shape, table] = group
        return self._groups[shape, table]

    def _staged_layers(self, target: TargetLayers) -> list[Any]:
        context = self._runner.compilation_config.static_forward_context
        numbers = {layer.name: number for number, layer in enumerate(self.staging.layers)}
        workspaces: dict[tuple[int, ...], VerifyWorkspace] = {}
        staged: list[Any] = []
        for name in [*numbers, *target.sharing]:
            layer, number = context[name], numbers[target.sharing.get(name, name)]
            around = (self.window, self.staging, self.inputs, self.inputs.table_of[name])
            workspace = _workspace(workspaces, layer, self._runner, self._length)
            group = self._group_of(layer, self.inputs.table_of[name], workspace)
            if is_latent(layer):
                staged.append(MlaStagingAttention(number, layer, *around, group))
            else:
                writes = name in numbers
                staged.append(StagingAttention(number, layer, *around, group, writes=writes))
        return staged

    def measure(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Time what attends windows of these sizes; how many were not stored already.

        Called between steps, with stock's methods in place.
        """
        from nwor_bench.instruments.versions import installed
        from nwor_bench.plugin.runner_v2.attention_timing import AttentionTiming

        facts = {
            "gpu": torch.cuda.get_device_name(self._runner.device),
            **{name: installed(name) or "" for name in ("vllm", "torch", "triton")},
            "kernels": kernels_digest(),
        }
        measured, commit = 0, COMMIT_S / len(self.layers)
        for shape, kind in self._kinds.items():
            alike = [layer for layer in self.layers if layer.group.kind is kind]
            store = ChoiceStore({**facts, "merges": kind.can_merge, **asdict(shape)})
            timing = AttentionTiming(self._runner, alike)
            try:
                measured += kind.choose(sizes, store, timing, commit)
            finally:
                del timing
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        return measured

    def _patches(self) -> list[Patch]:
        patches = [patch for layer in self.layers for patch in layer.patches()]
        if self.states is not None:
            patches += state_patches(self.states)
        return patches


def set_up_staging(
    runner: Any, target: TargetLayers, settings: PluginSettings
) -> tuple[StagingParts | None, str | None]:
    """Everything that staging needs from vLLM's V2 runner; see `set_up`."""
    return set_up(lambda: StagingParts(runner, target, settings))


def _module_of(layer: Any) -> Any:
    """What is known of its kind of attention."""
    return mla_attention if is_latent(layer) else attention_layers


def _workspace(
    made: dict[tuple[int, ...], VerifyWorkspace], layer: Any, runner: Any, length: int
) -> VerifyWorkspace:
    impl, most, heads = layer.impl, runner.max_num_reqs, layer.impl.num_heads
    latent = is_latent(layer)
    of_key = impl.kv_lora_rank if latent else impl.head_size
    of_value = impl.qk_rope_head_dim if latent else layer.head_size_v
    shape = (latent, heads, impl.num_kv_heads, of_key, of_value)
    if shape not in made and latent:
        made[shape] = create_workspace(
            most, length, heads, of_key, of_value, runner.dtype.itemsize, runner.device
        )
    elif shape not in made:
        made[shape] = VerifyWorkspace.create(
            max_requests=most,
            num_heads=heads,
            num_kv_heads=impl.num_kv_heads,
            head_dim=of_key,
            value_dim=of_value,
            max_query_len=length,
            device=runner.device,
        )
    return made[shape]


def target_caches(runner: Any, names: Sequence[str], slots: SlotRows) -> list[LayerCache]:
    """The target's caches on a GPU."""
    context = runner.compilation_config.static_forward_context
    return [
        LayerCache(name, *rows_of(context[name]), runner.dtype, row, _scales_of(context[name]))
        for name, row in zip(names, slots.of_layer, strict=True)
    ]


def _scales_of(layer: Any) -> tuple[Tensor, Tensor] | None:
    if not layer.impl.kv_cache_dtype.startswith("fp8"):
        return None
    key_scale = layer._k_scale.view(-1)
    return key_scale, key_scale if is_latent(layer) else layer._v_scale.view(-1)


class StagingModes:
    """Switches the target layers between stock's methods and ours, and captures our graphs."""

    def __init__(self, parts: StagingParts, vote: RankVote):
        self._parts = parts
        self._vote = vote
        self._patched_next = False
        self._chosen = False

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
        self._choose()
        self.patch(True)
        self._capture(self.graphs_of(nwor_mode is NworMode.CONTROL))
        return None

    def _choose(self) -> None:
        """Settle the contender of each captured size, the first time."""
        parts = self._parts
        if self._chosen or parts.attention_by is not AttentionBy.AUTO:
            return
        self._chosen = True
        parts.choices.leaves_none = parts.states is not None and parts.states.unavailable is None
        sizes = sorted({(d.num_reqs, d.uniform_token_count) for d in parts.graphs.of_stock()})
        if not sizes:
            return
        began, measured = time.perf_counter(), 0
        self.patch(False)  # stock is timed too
        try:
            measured = parts.measure(sizes)
        except Exception as fault:  # out of memory, or metadata of another form
            logger.exception("nwor: attention could not be timed; a table chooses")
            parts.choices.forget(type(fault).__name__)
        parts.choices.take(self._vote.of_first(parts.choices.given()), sizes)
        logger.info(
            "nwor: attention of %d window sizes, %d of them timed in %.1f s: %s",
            len(sizes), measured, time.perf_counter() - began,
            "; ".join(f"{size} {how}" for size, how in parts.choices.in_words().items())
            or f"a table chooses ({parts.choices.failed or 'not timed'})",
        )  # fmt: skip

    def graphs_of(self, control: bool) -> StagingGraphs:
        """The graphs of mode control, or of mode stage."""
        return self._parts.control_graphs if control else self._parts.graphs

    def patch(self, patched: bool) -> None:
        """Wrap the target layers' attention, or restore the stock methods."""
        self._patched_next = patched
        if self._parts.attention.applied is patched:
            return
        if patched:
            self._parts.attention.apply()
        else:
            self._parts.attention.undo()

    def patch_next(self, patched: bool) -> None:
        """`patch`, but only before the next forward that calls the layers' methods.

        A full CUDA graph calls none, so a switch between two of them costs nothing.
        """
        self._patched_next = patched

    @property
    def is_patch_due(self) -> bool:
        """True if `patch_next` asked for something else than what is in place."""
        return self._parts.attention.applied is not self._patched_next

    def patch_now(self) -> None:
        """Do what `patch_next` asked for: the forward that comes next calls the layers."""
        self.patch(self._patched_next)

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
    if stock is not None and stock.cudagraph_mode.decode_mode() is CUDAGraphMode.FULL:
        facts["largest_window"] = stock.compilation_config.max_cudagraph_capture_size
    graphs, sham = (parts.graphs, parts.sham_graphs) if parts else (None, None)
    facts["stock_window_sizes"] = sorted(d.num_tokens for d in graphs.wanted()) if graphs else []
    facts["stage_window_sizes"] = graphs.capture_sizes if graphs else []
    facts["sham_window_sizes"] = sham.capture_sizes if sham else []
    facts["sham_capture_s"] = sham.capture_s if sham else None
    facts["attention"] = parts.choices.in_words() if parts else None
    facts["attention_us"] = parts.choices.times_us() if parts else None
    facts["attention_untimed"] = parts.choices.failed if parts else None
    control = parts.control_graphs if parts else None
    for name, graph_set in (("stage", graphs), ("control", control), ("sham", sham)):
        facts[f"{name}_memory_bytes"] = graph_set.memory_bytes if graph_set else None
        facts[f"{name}_unavailable"] = graph_set.unavailable if graph_set else None
    return facts
