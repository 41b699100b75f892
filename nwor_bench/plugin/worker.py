"""Worker extension called through `collective_rpc`.

Methods return plain dicts and lists, since results may cross a process border.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from nwor_bench import plugin
from nwor_bench.errors import BenchError
from nwor_bench.plugin import dummy_weights, refusals, register
from nwor_bench.plugin.attaching import HOOK, NOT_ATTACHED, RANGES
from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.plugin.observe.attention_nudge import AttentionNudge
from nwor_bench.plugin.observe.kv_rows import KvRows
from nwor_bench.plugin.observe.state_rows import StateRows
from nwor_bench.plugin.observe.window_counters import CountedWindows
from nwor_bench.plugin.observe.write_watch import COUNTS, WriteWatch
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.records.window import table_of
from nwor_bench.records.window_order import Order, places_of

register()

TOOLS = "nwor_tools"
"""Attribute of a worker that holds its instruments by name, each made at its first use."""

Tool = TypeVar("Tool")


def _tool(worker: Any, name: str, make: Callable[[], Tool]) -> Tool:
    tools: dict[str, Any] = vars(worker).setdefault(TOOLS, {})
    if name not in tools:
        tools[name] = make()
    tool: Tool = tools[name]
    return tool


class NworWorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    def nwor_set_modes(self, nwor_mode: str, scv_mode: str) -> None:
        """Switch modes; call it between batches."""
        _hook(self).set_modes(NworMode(nwor_mode), ScvMode(scv_mode))

    def nwor_interleave(
        self,
        cells: list[tuple[str, str]],
        order: tuple[list[tuple[int, int]], str, dict[int, int]] | None,
    ) -> None:
        """Interleave cells in the next batch; call it between batches.

        Args:
            order: pairs, seed and run lengths of its places; None if the scheduler has them.
        """
        places = None
        if order is not None:
            pairs, seed, run_lengths = order
            places = Order(places_of([(a, b) for a, b in pairs], seed, run_lengths))
        switch = ModeSwitch(_hook(self), cells, places)
        switch.start()
        vars(self).setdefault(TOOLS, {})["switch"] = switch

    def nwor_constant_drafter(self) -> str | None:
        """The drafter's class if it drafts the same number whatever the scheduler says."""
        return refusals.constant_drafter(_hook(self).runner)

    def nwor_verifies_adaptively(self) -> bool:
        """True if vLLM decides how many drafts to verify: it may drop what was asked for."""
        return getattr(_hook(self).runner, "adaptive_verification", None) is not None

    def nwor_stop_interleaving(self) -> list[dict[str, dict[str, int]]]:
        """Return to mode off; each cell's SCV counters, in the cells' order."""
        hook = _hook(self)
        hook.interleave(None)
        hook.set_modes(NworMode.OFF, ScvMode.OFF)
        switch: ModeSwitch = getattr(self, TOOLS)["switch"]
        return switch.facts()

    def nwor_seed(self, seed: int) -> None:
        """Seed the worker's random stream, so that equal batches sample equally.

        `SamplingParams(seed=...)` fails on a CPU: with chunked prefill vLLM 0.32 rewinds a
        request's generator.
        """
        torch.manual_seed(seed)
        # The V2 runner draws the seed of a request that brings none from numpy.
        np.random.seed(seed % 2**32)

    def nwor_drain(self, output_lengths: dict[str, int] | None = None) -> dict[str, Any]:
        """Windows, as a `WindowTable`, and counters since the last drain; waits for the device.

        Args:
            output_lengths: tokens that each finished request returned, by its name; windows that
                ran past them are counted separately, because vLLM does not count them.
        """
        hook = _hook(self)
        return {
            "windows": table_of(hook.drain(output_lengths)),
            "request_acceptance": hook.take_request_counts(),
            "scv_counters": dict(hook.validator.counters),
            "scv_fallbacks": dict(hook.validator.fallbacks),
            "device_errors": hook.device_errors(),
        }

    def nwor_set_nvtx(self, on: bool) -> None:
        """Put NVTX ranges around windows, or take them away; call it between batches."""
        _hook(self)
        getattr(self, RANGES).switch(on)

    def nwor_set_counters(self, on: bool) -> None:
        """Count the DRAM bytes of windows, or stop."""
        hook = _hook(self)
        _tool(self, "counters", lambda: CountedWindows(hook)).switch(on)

    def nwor_start_counters(self) -> None:
        """Begin to count a batch."""
        getattr(self, TOOLS)["counters"].start()

    def nwor_take_counters(self) -> dict[str, Any]:
        """End the batch: columns of each window's counts."""
        return dict(getattr(self, TOOLS)["counters"].take())

    def nwor_watch_writes(self, on: bool) -> dict[str, int]:
        """Watch staged slots, or stop; see `WriteWatch.switch`. Call it between batches."""
        hook = _hook(self)
        window, buffers = hook.window, hook.buffers
        if window is None or buffers is None:
            return dict.fromkeys(COUNTS, 0)
        watch = _tool(self, "write watch", lambda: WriteWatch(window, buffers.layers))
        return dict(watch.switch(on))

    def nwor_check_layers(self, requests: int | None) -> list[dict[str, Any]]:
        """Check each layer of some windows of the next batch; see `RunnerHook.check_layers`."""
        return _hook(self).check_layers(requests)

    def nwor_watch_blocks(self, on: bool) -> None:
        """Note the cache blocks of the gate's next batch; or stop and forget all rows.

        The states of some of its requests are copied, too, and its windows run staged and directly
        whatever their context (`AttentionChoices.gate`).
        """
        hook = _hook(self)
        hook.gate(on)
        rows = _tool(self, "rows", lambda: KvRows(hook))
        states = _tool(self, "states", lambda: StateRows(hook))
        for tool in (rows, states) if on else (states, rows):  # one wraps what the other has
            tool.watch(on)

    def nwor_nudge_attention(self, on: bool) -> None:
        """Move the output of the target's attention by a rounding step, or stop."""
        hook = _hook(self)
        context = hook.runner.compilation_config.static_forward_context
        layers = [context[name] for name in hook.target_layers]
        _tool(self, "nudge", lambda: AttentionNudge(layers)).switch(on)

    def nwor_keep(
        self, kind: str, name: str, requests: list[str], spans: list[tuple[int, int]]
    ) -> dict[str, Any]:
        """Keep K/V "rows" or "states" of finished requests under `name`; see their `keep`."""
        return dict(getattr(self, TOOLS)[kind].keep(name, requests, spans))

    def nwor_compare(
        self, kind: str, name: str, pairs: list[tuple[int, str, int, int]]
    ) -> dict[str, Any]:
        """Errors of kept rows or states against others; see their `compare`."""
        return dict(getattr(self, TOOLS)[kind].compare(name, pairs))

    def nwor_drop(self, kind: str, names: list[str]) -> None:
        """Forget kept rows or states."""
        getattr(self, TOOLS)[kind].drop(names)

    def nwor_status(self) -> dict[str, Any]:
        """Facts about runner, layers and staging, for run.json and the cross-checks."""
        hook = _hook(self)
        config = self.vllm_config  # type: ignore[attr-defined]
        speculative = config.speculative_config
        drafter = speculative and speculative.draft_model_config
        return {
            "attached": hook.attached,
            "runner": hook.name,
            "device": str(hook.runner.device),
            "target_layers": len(hook.target_layers),
            "kv_heads": config.model_config.get_num_kv_heads(config.parallel_config),
            "drafter_layers": len(hook.drafter_layers),
            "staging_buffers": hook.buffers.num_layers if hook.buffers else 0,
            "staging_capacity": hook.buffers.capacity if hook.buffers else 0,
            "staging_unavailable": hook.staging_unavailable,
            "stage_by": str(hook.stage_by),
            "bytes_per_token": hook.buffers.bytes_per_token if hook.buffers else None,
            **_reserved_states(hook),
            "state_layers": len(hook.states.layers) if hook.states else 0,
            "states_unavailable": hook.states_unavailable,
            "state_bytes": hook.states.bytes_per_request if hook.states else None,
            "state_record_bytes": hook.states.record_bytes if hook.states else None,
            "state_record_token_bytes": hook.states.token_bytes if hook.states else None,
            "experts": config.model_config.get_num_experts(),
            "rejection_sample_method": speculative and speculative.rejection_sample_method,
            "drafter_max_model_len": drafter and drafter.max_model_len,
            "block_size": config.cache_config.block_size,
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "dtype": str(hook.runner.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "attention_backend": _backend_name(hook),
            "dummy_weights": dummy_weights.facts_of(hook.runner),
            "cuda_graphs": hook.graph_facts(),
            "launch_refusals": hook.launch_refusals(),
        }

    def nwor_window_state(self) -> str | None:
        """The state of the window, "idle" between steps; None if nothing can be staged."""
        window = _hook(self).window
        return None if window is None else window.state.value

    def nwor_set_hooks(self, attached: bool) -> None:
        """Wrap the runner, or restore its stock methods; nothing if that is done already."""
        hook = _hook(self)
        if attached and not hook.attached:
            hook.attach()
            hook.set_modes(hook.nwor_mode, hook.validator.mode)  # its layers too
        elif not attached:
            hook.check_mode(NworMode.OFF)
            hook.detach()

    def nwor_leave(self) -> None:
        """Give back what is wrapped, before the engine ends: vLLM's modules outlive it, and the
        process's next engine would find an update there that it does not know."""
        hook: RunnerHook | None = getattr(self, HOOK, None)
        if hook is not None:
            hook.detach()


def _hook(worker: Any) -> RunnerHook:
    hook: RunnerHook | None = getattr(worker, HOOK, None)
    if hook is not None:
        return hook
    reason = getattr(worker, NOT_ATTACHED, None) or plugin.not_installed
    if reason is not None:
        raise BenchError.at(
            "the nwor-bench plugin is not attached to this worker",
            f"because of {reason}; vLLM runs without it, and its log has the traceback",
            reason,
            joint=", ",
        )
    raise BenchError.at(
        "the nwor-bench plugin is not attached to this worker",
        "it needs VLLM_NWOR_MODE or VLLM_SCV_MODE in the environment and speculation switched on",
        joint="; ",
    )


def _reserved_states(hook: RunnerHook) -> dict[str, int | None]:
    """Slots that a request reserves in each recurrent layer of the target, and their bytes."""
    names, slots, total = set(hook.layers.recurrent), None, 0
    for group in hook.runner.kv_cache_config.kv_cache_groups:
        layers = len(names.intersection(group.layer_names))
        if layers:
            slots = 1 + group.kv_cache_spec.num_speculative_blocks
            total += layers * slots * group.kv_cache_spec.page_size_bytes
    return {"state_slots": slots, "state_reserved_bytes": total or None}


def _backend_name(hook: RunnerHook) -> str | None:
    """The first attention implementation among the target layers; None for recurrent ones."""
    context = hook.runner.compilation_config.static_forward_context
    implementations = (getattr(context[name], "impl", None) for name in hook.target_layers)
    return next((type(impl).__name__ for impl in implementations if impl is not None), None)
