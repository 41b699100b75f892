"""A second set of full CUDA graphs, captured while staging, beside vLLM's own set.

A captured forward is fixed: vLLM's graphs write every draft to the cache. So the
same model is captured once more with the target layers staging. The K/V activations of that
capture keep their addresses for as long as the graphs live, and every replay leaves a window's
K/V there until the next replay from the pool, which is after the commit. Staging by copy, the
graph holds the copies' kernels, and writes each window's first token to where the window's
`direct_slots` say at the time of the replay.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook

from nwor_bench.plugin.layers import StagingUnavailable
from nwor_bench.plugin.runner_v2.attention_choice import AttentionChoices, Size
from nwor_bench.plugin.runner_v2.capture_streams import capturing_on, unused_stream
from nwor_bench.plugin.runner_v2.plan import (
    GpuWindowBatch,
    StepDrafts,
    equal_drafts,
    whole_step,
)
from nwor_bench.plugin.runner_v2.staged_layer import StepInputs
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.states import WindowStates
from nwor_bench.plugin.window import Window

logger = logging.getLogger("vllm.nwor_bench")


class StagingGraphs:
    """The graphs that replay a window in mode `stage`, one a captured decode shape.

    Args:
        runner: vLLM's V2 model runner, after it has captured its own graphs.
        slots: index of the target layers' slots in the runner's (`SlotRows.chosen`).
        copied: drafts are copied, not left in the capture's own memory.
        choices: which windows are left to stock; None: none is.
        states: the target's recurrent states; None if stock keeps them.
    """

    _purpose = "NWOR stage"
    _control = False

    def __init__(
        self,
        runner: Any,
        window: Window,
        staging: GpuStaging,
        inputs: StepInputs,
        slots: int | slice,
        copied: bool = False,
        choices: AttentionChoices | None = None,
        states: WindowStates | None = None,
    ):
        self._choices = choices
        self._states = states
        self._runner = runner
        self._slots = slots
        self._inputs = inputs
        self._window = window
        self._staging = staging
        self._manager: ModelCudaGraphManager | None = None
        self._copied = copied
        self.only: Any = None
        """The one shape that is captured; None: every shape that vLLM has captured."""
        self.shapes: dict[BatchExecutionDescriptor, GpuWindowBatch] = {}
        """Each captured window, as it was captured: all padding."""
        self.memory_bytes: int | None = None
        self.capture_s: float | None = None
        self.unavailable: str | None = None

    @property
    def capture_sizes(self) -> list[int]:
        """Token counts that the set can replay, ascending."""
        return sorted(desc.num_tokens for desc in self.shapes)

    def wanted(self) -> list[BatchExecutionDescriptor]:
        """vLLM's own full graphs of equal windows with drafts, largest first.

        One for each number of active adapters, and with dynamic speculation for each length; none
        of a size that is always left to stock.
        """
        windows = self.of_stock() if self.only is None else [self.only]
        choices = self._choices
        return [d for d in windows if choices is None or not choices.of(_size(d)).always]

    def of_stock(self) -> list[BatchExecutionDescriptor]:
        """All of them."""
        stock = self._runner.cudagraph_manager
        if stock is None:
            return []
        full = [desc for desc in stock.graphs if desc.cg_mode is CUDAGraphMode.FULL]
        windows = [d for d in full if (d.uniform_token_count or 1) > 1 and d.num_ubatches == 1]
        return sorted(windows, key=lambda desc: desc.num_tokens, reverse=True)

    def why_direct(self, descriptor: Any, input_batch: Any) -> str | None:
        """See `CapturedWindows`."""
        choices = self._choices
        return None if choices is None else choices.why_direct(_size(descriptor), input_batch)

    def capture(self) -> None:
        """Capture every wanted shape once; a failure leaves the set empty and says why.

        The caller has wrapped the target layers' attention.
        """
        if self.shapes or self.unavailable or not self.wanted():
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free_before, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        try:
            self._manager = self._make_manager()
            stream = unused_stream(self._runner.device)
            self._manager.captured_on = stream  # held as long as the graphs
            with self._dummy_adapters(), capturing_on(stream):
                for desc in self.wanted():
                    self.shapes[desc] = self._capture_one(self._manager, desc)
        except Exception as fault:  # out of memory, or a kernel that cannot be captured
            logger.exception(
                "nwor: no full CUDA graphs for %s; windows are written directly", self._purpose
            )
            known = isinstance(fault, StagingUnavailable)
            self.give_up(f"graph_capture:{fault if known else type(fault).__name__}")
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.capture_s = time.perf_counter() - started
        self.memory_bytes = free_before - torch.cuda.mem_get_info()[0]

    def give_up(self, reason: str | None) -> None:
        """Drop the graphs for good because this or another rank has none; None: do nothing."""
        if reason is None:
            return
        self.shapes.clear()
        self._manager = None
        self.unavailable = reason
        torch.cuda.empty_cache()

    def replay(self, desc: BatchExecutionDescriptor) -> Any:
        """Run one captured window; the model's output, in vLLM's own output buffers."""
        assert self._manager is not None
        return self._manager.run_fullgraph(desc)

    def _dummy_adapters(self) -> AbstractContextManager[None]:
        """LoRA adapters to capture with, as vLLM does for its own graphs.

        They are removed afterwards, and so are those of earlier requests: vLLM loads an adapter
        again as its next request comes.
        """
        config = self._runner.lora_config
        return nullcontext() if config is None else self._runner.maybe_setup_dummy_loras(config)

    def _make_manager(self) -> ModelCudaGraphManager:
        runner, stock = self._runner, self._runner.cudagraph_manager
        manager = ModelCudaGraphManager(
            runner.vllm_config,
            runner.device,
            stock.cudagraph_mode,
            stock.decode_query_len,
            lora_capture_cases=stock.lora_capture_cases,
            varlen_decode=stock.varlen_decode,
        )
        # Both sets write the model's output to the same buffers: one replays at a time.
        manager.hidden_states = stock.hidden_states
        manager.aux_hidden_states = stock.aux_hidden_states
        manager.intermediate_tensors = stock.intermediate_tensors
        return manager

    def _capture_one(
        self, manager: ModelCudaGraphManager, desc: BatchExecutionDescriptor
    ) -> GpuWindowBatch:
        batch = self._padding(desc)
        self._staging.open(batch)
        self._inputs.open_capture(len(batch.num_draft_tokens))
        with _repeated(self._window, batch, self._control, self._states):
            self._run_capture(manager, desc)
            reason = self._window.fallback_reason
            if reason is None and not self._window.staged_every_layer:
                reason = "layer_not_staged"
            if reason is not None:
                raise StagingUnavailable(reason)
            # Built after the capture: the last forward is the one that was captured. The tensors
            # are let go as the window ends, so that the next shape can have their memory.
            sources = self._staging.captured_sources()
            states = None if self._states is None else self._states.captured()
        attended = "" if self._choices is None else self._choices.attended(_size(desc))
        path = f"full graph, {attended}"
        captured = replace(batch, sources=sources, states=states, path=path)
        if not self._control:
            self._staging.warm_up(captured)
        return captured

    def _run_capture(self, manager: ModelCudaGraphManager, desc: BatchExecutionDescriptor) -> None:
        runner = self._runner
        manager._capture_descs = {CUDAGraphMode.FULL: [desc]}
        manager.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            has_lora=runner.lora_config is not None,
            use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
            lora_capture_hook=create_lora_capture_hook(runner.lora_config, runner),
            progress_bar_desc=f"Capturing CUDA graphs for {self._purpose}",
        )

    def _padding(self, desc: BatchExecutionDescriptor) -> GpuWindowBatch:
        """Windows of the captured shape, on which the capture runs.

        Their slots are the runner's own buffer, which holds every step's slots and only padding
        now: so the commit is compiled for the layout that it will get.
        """
        requests, length = desc.num_reqs, desc.uniform_token_count
        assert requests is not None
        assert length is not None
        slots = self._runner.block_tables.get_dummy_slot_mappings(desc.num_tokens)[self._slots]
        if self._copied:
            return equal_drafts(requests, length, self._runner.device, slots.shape[:-1])
        rows = torch.arange(desc.num_tokens, device=self._runner.device)
        counts = StepDrafts(np.full(requests, length - 1, dtype=np.int32), desc.num_tokens)
        return whole_step(counts, length, rows, slots)


class ControlGraphs(StagingGraphs):
    """Graphs of mode `control`: the layers write their drafts too, and nothing is committed."""

    _control = True


class StockGraphs(StagingGraphs):
    """Stock's own forward captured once more, without our attention, for the A/A arm's sham."""

    _purpose = "the A/A arm"

    def _capture_one(
        self, manager: ModelCudaGraphManager, desc: BatchExecutionDescriptor
    ) -> GpuWindowBatch:
        self._run_capture(manager, desc)
        return self._padding(desc)


def _size(desc: Any) -> Size:
    return desc.num_reqs, desc.uniform_token_count


@contextmanager
def _repeated(
    window: Window, batch: GpuWindowBatch, control: bool, states: WindowStates | None
) -> Iterator[None]:
    """Keep a window open over several forwards (warm-up and capture), then forget it."""
    window.begin(batch, repeats=True, control=control)
    try:
        yield
    finally:
        window.forget()
        if states is not None:
            states.drop()
