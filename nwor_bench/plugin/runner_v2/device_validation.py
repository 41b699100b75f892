"""Speculative cache validation on a GPU: which drafts of this window were accepted?

vLLM's V2 sampler leaves `num_sampled` on the device. Mode `off` copies it to the host and loops,
the reference. Mode `graph` replays a CUDA graph of the kernel, one a bucketed shape, captured
when the shape is first seen. Mode `adaptive` launches the kernel eagerly until a shape has
recurred `TRIALS` times, then replays it as often, and from then on takes the way that costs the
host less time; but if the launch can also run vLLM's update of its requests (`stock_update`), it
saves a launch, and nothing is tried. The way of each window is counted.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.runner_hook import ScvValidator
from nwor_bench.plugin.runner_v2.capture_streams import unused_stream
from nwor_bench.plugin.runner_v2.layer_set import CommitLaunch
from nwor_bench.plugin.step import DeviceClock, Step
from nwor_bench.records.types import ScvMode
from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton, bind_mask

logger = logging.getLogger("vllm.nwor_bench")

TRIALS = 8
"""Adaptive: eager launches of a shape before it is captured, and replays to compare with them."""

MAX_GRAPHS = 32
"""Captured shapes kept; the one longest unused is evicted for a new one."""

Shape = tuple[Hashable, ...]
"""Name of a launch: equal launches differ only in their counts."""


class DeviceValidation(NamedTuple):
    """The decision about one window."""

    num_accepted: Tensor
    """[requests] int32 on the device, accepted drafts of each request."""
    path: str
    """"host", "device" (launched eagerly), "capture" (launched eagerly, then captured for the next
    window) or "graph"."""
    fallback_reason: str | None = None
    """Why the mode's own path was not taken; None if it was."""


@dataclass
class _Trial:
    """Adaptive: host seconds of each way for one shape, and which one pays."""

    eager: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)
    replay_pays: bool = True
    """True until as many replays have been tried as launches, then by their medians."""


_NO_TRIAL = _Trial()
"""For mode `graph`, which compares nothing: it stays empty, so replaying pays."""


@dataclass
class _Captured:
    """A graph and the buffer that its input is copied to."""

    graph: torch.cuda.CUDAGraph
    num_sampled: Tensor

    def replay(self, given: Tensor) -> None:
        """Fill the first of the captured counts; the rest are padding and never committed."""
        kept = self.num_sampled
        if given.shape != kept.shape:  # making a view takes the host longer than the comparison
            kept = kept[: given.shape[0]]
        kept.copy_(given)
        self.graph.replay()


class DeviceValidator(ScvValidator):
    """Validates windows in one SCV mode at a time and counts how.

    Args:
        drafts: most drafts of a request.
        max_requests: most requests of a step.
    """

    def __init__(self, drafts: int, max_requests: int, device: torch.device):
        super().__init__()
        self._device = device
        most = _bucket(max_requests)
        self._mask = torch.empty(most * drafts, dtype=torch.bool, device=device)
        self._num_accepted = torch.zeros(most, dtype=torch.int32, device=device)
        self._graphs: OrderedDict[Shape, _Captured] = OrderedDict()
        self._trials: dict[Shape, _Trial] = {}
        self._cannot_capture: str | None = None
        self._mask_launches: dict[int, Callable[[Tensor], None]] = {}

    @cached_property
    def capture_stream(self) -> torch.cuda.Stream:
        """The stream that launches are captured on: kernels keep its attributes in the graph."""
        return unused_stream(self._device)

    def validate(
        self, num_sampled: Tensor, drafts: np.ndarray, uniform: int | None
    ) -> DeviceValidation:
        """Decide which drafts were accepted.

        Args:
            num_sampled: [requests] int32 on the device: accepted drafts + 1, or 0 for a
                request that only prefills.
            drafts: [requests] int32 on the host, drafts of each request.
            uniform: drafts of every request if all have as many.
        """
        if self.mode is ScvMode.OFF:
            return self._on_host(num_sampled, drafts)
        num_accepted = self._num_accepted[: len(drafts)]
        if uniform is None:
            self.count_fallback("uneven_windows")
            self._launch_uneven(num_sampled, drafts, num_accepted)
            return DeviceValidation(num_accepted, "device", "uneven_windows")
        requests = _bucket(len(drafts))
        shape = ("mask", requests, uniform)
        path, reason = self.run(shape, requests, self._mask_launch(uniform), num_sampled)
        return DeviceValidation(num_accepted, path, reason)

    def validate_step(self, step: Step, num_sampled: Tensor, clock: DeviceClock) -> Tensor:
        """[requests] int32, accepted drafts of each; the step is told how it was decided."""
        assert step.drafts is not None
        began = time.perf_counter()
        validation = self.validate(num_sampled, step.drafts, step.uniform)
        clock.phase(step, "mask_ms")
        step.scv_path, step.scv_fallback_reason = validation.path, validation.fallback_reason
        step.scv_s = time.perf_counter() - began
        return validation.num_accepted

    def launch_commit(self, step: Step, launch: CommitLaunch, num_sampled: Tensor) -> None:
        """Launch the commit of a step's captured window, which decides itself."""
        began = time.perf_counter()
        shape = step.batch.commit_shape
        _, tokens, length, _ = shape
        step.scv_path, step.scv_fallback_reason = self.run(
            shape, tokens // length, launch, num_sampled
        )
        step.scv_s = time.perf_counter() - began

    def warm_up(self, drafts: int) -> None:
        """Compile the mask kernel for windows of this length, so that no window waits for it.

        The kernel has a binary for every power of two of requests.
        """
        if drafts in self._mask_launches:
            return
        launch, requests = self._mask_launch(drafts), self._num_accepted.numel()
        while requests:
            launch(torch.zeros(requests, dtype=torch.int32, device=self._device))
            requests //= 2

    def run(
        self, shape: Shape, requests: int, launch: Callable[[Tensor], None], num_sampled: Tensor
    ) -> tuple[str, str | None]:
        """Launch a kernel that decides on `num_sampled`, as this mode does.

        Args:
            shape: names the launch; equal shapes differ only in their counts.
            requests: most counts that a launch of this shape takes.
            launch: launches the kernel for these counts; captured with counts of its own.
            num_sampled: [up to `requests`] int32 on the device.

        Returns:
            The path taken and the fallback reason, as in `DeviceValidation`.
        """
        captured = self._graphs.get(shape)
        adaptive = self.mode is ScvMode.ADAPTIVE
        trial = self._trials.setdefault(shape, _Trial()) if adaptive else _NO_TRIAL
        untried = adaptive and len(trial.eager) < TRIALS
        began = time.perf_counter()
        if captured is not None and not untried and trial.replay_pays:
            self._graphs.move_to_end(shape)
            self.counters["scv_graph_hits"] += 1
            self.counters["scv_launches"] += 2  # the copy of the counts, and the graph
            captured.replay(num_sampled)
            if adaptive and len(trial.replayed) < TRIALS:
                trial.replayed.append(time.perf_counter() - began)
                if len(trial.replayed) == TRIALS:
                    trial.replay_pays = median(trial.replayed) < median(trial.eager)
            return "graph", None
        launch(num_sampled)
        if untried:
            trial.eager.append(time.perf_counter() - began)
        self.counters["scv_device_validations"] += 1
        self.counters["scv_launches"] += 1
        if captured is not None:
            self.counters["scv_kept_eager"] += 1
            return "device", None
        self.counters["scv_graph_misses"] += 1
        if self._cannot_capture:
            self.count_fallback(self._cannot_capture)
            return "device", self._cannot_capture
        if adaptive and len(trial.eager) < TRIALS:
            return "device", None
        # The launch above served this window, and was the warm-up that a capture needs.
        self._cannot_capture = problem = self._capture(shape, requests, launch)
        if problem:
            self.count_fallback(problem)
            return "device", problem
        return "capture", None

    @property
    def joins_update(self) -> bool:
        """True if this mode has a window decided by the launch that also runs vLLM's update.

        No graph can: the update's tensors are others in every step.
        """
        return self.mode is ScvMode.ADAPTIVE

    def joined_update(self) -> str:
        """Count a window that was decided so; its path."""
        self.counters["scv_device_validations"] += 1
        self.counters["scv_launches"] += 1
        return "device"

    def forget(self, sources: Hashable) -> None:
        """Drop the launches that commit from these captured addresses."""
        for kept in (self._graphs, self._trials):
            for shape in [shape for shape in kept if shape[-1] == sources]:
                del kept[shape]

    def _on_host(self, num_sampled: Tensor, drafts: np.ndarray) -> DeviceValidation:
        counts = num_sampled.tolist()
        accepted = [
            min(max(sampled - 1, 0), allowed)
            for sampled, allowed in zip(counts, drafts.tolist(), strict=True)
        ]
        self.counters["scv_host_syncs"] += 1
        num_accepted = torch.tensor(accepted, dtype=torch.int32).pin_memory()
        return DeviceValidation(num_accepted.to(self._device, non_blocking=True), "host")

    def _mask_launch(self, drafts: int) -> Callable[[Tensor], None]:
        if drafts not in self._mask_launches:
            self._mask_launches[drafts] = bind_mask(self._mask, self._num_accepted, drafts)
        return self._mask_launches[drafts]

    def _launch_uneven(self, num_sampled: Tensor, drafts: np.ndarray, num_accepted: Tensor) -> None:
        self.counters["scv_device_validations"] += 1
        self.counters["scv_launches"] += 1
        pinned = torch.from_numpy(np.ascontiguousarray(drafts, dtype=np.int32)).pin_memory()
        on_device = pinned.to(self._device, non_blocking=True)
        mask = self._mask[: int(drafts.sum())]
        acceptance_mask_from_counts_triton(num_sampled, on_device, mask, num_accepted)

    def _capture(self, shape: Shape, requests: int, launch: Callable[[Tensor], None]) -> str | None:
        """Capture a launch with counts of its own; the fallback reason if that fails."""
        if len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
            self.counters["scv_graph_evictions"] += 1
        num_sampled = torch.zeros(requests, dtype=torch.int32, device=self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            stream = self.capture_stream
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                launch(num_sampled)
        except (RuntimeError, torch.OutOfMemoryError) as fault:
            logger.exception("nwor: validation could not be captured; it runs eagerly")
            return f"graph_capture:{type(fault).__name__}"
        self._graphs[shape] = _Captured(graph, num_sampled)
        self.counters["scv_graph_captures"] += 1
        return None


def _bucket(requests: int) -> int:
    """Requests rounded up to a power of two: few shapes, so few graphs."""
    return 1 << max(requests - 1, 0).bit_length()
