"""Install the plugin in a vLLM process, and attach its hook to each worker after warm-up.

An installed plugin never stops a vLLM process, except as it starts to interleave draft counts, or
with one state slot a request (`state_slots`), where stock's windows would be wrong. Any other
error is logged once with its traceback, counted under its reason, and every patch is undone. With
tensor parallelism all ranks attach, or none, since attached ranks wait for each other.
"""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nwor_bench.errors import ConfigError
from nwor_bench.instruments import nvtx_ranges
from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.observe.nvtx import WindowRanges
from nwor_bench.plugin.patching import Patch, PatchError, PatchSet
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import DRAFTS, PluginSettings, read_settings
from nwor_bench.plugin.state_slots import require_one_slot, slot_patches

if TYPE_CHECKING:
    from nwor_bench.plugin.live import LiveTraffic

logger = logging.getLogger("vllm.nwor_bench")


CPU_BACKEND = "nwor_bench.plugin.runner_v1.cpu_attention.ReferenceCPUAttentionBackend"
"""Our backend in place of vLLM's on a CPU."""

_patches: PatchSet | None = None


def install(settings: PluginSettings) -> None:
    """Attach to every worker after its warm-up; on a CPU override the attention backend too.

    Warm-up runs on dummy tensors, which must not be staged.

    Raises:
        ConfigError: a platform without a hook, or one that cannot stage as asked.
    """
    global _patches
    if _patches is not None:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        patches = _install_on_cpu(settings, type(current_platform))
    elif current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        patches = [Patch(Worker, "compile_or_warm_up_model", _attach_after)]
    else:
        raise ConfigError.for_field(
            "device",
            current_platform.device_name,
            "nwor-bench hooks vLLM on NVIDIA GPUs and on CPUs; unset VLLM_NWOR_MODE, "
            "VLLM_SCV_MODE and VLLM_NWOR_DRAFTS to run vLLM without it",
        )
    patches += slot_patches()
    if settings.drafts:
        from nwor_bench.plugin.draft_patches import draft_patches

        patches += draft_patches()
    _patches = PatchSet(patches)
    _patches.apply()


def _install_on_cpu(settings: PluginSettings, platform: type) -> list[Patch]:
    if settings.needs_gpu:
        raise ConfigError.for_field(
            settings.needs_gpu,
            os.environ.get(settings.needs_gpu, ""),
            "it needs a CUDA device, and this vLLM runs on the CPU; unset it",
        )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.worker.cpu_worker import CPUWorker

    if not settings.drafts:  # they are compared on stock's own
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    return [
        Patch(CPUWorker, "compile_or_warm_up_model", _attach_after),
        Patch(platform, "register_triton_kernel_overrides", _once),
    ]


def _attach_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(worker: Any) -> Any:
        result = original(worker)
        attach_hook(worker)
        _require_drafts(worker)
        require_one_slot(worker, getattr(worker, HOOK, None), getattr(worker, NOT_ATTACHED, None))
        return result

    return compile_or_warm_up_model


def _require_drafts(worker: Any) -> None:
    """Raise ConfigError if draft counts would alternate and nobody measured their windows."""
    settings, reason = read_settings(), getattr(worker, NOT_ATTACHED, None)
    if settings is not None and settings.drafts and reason is not None:
        raise ConfigError.at(DRAFTS, f"draft counts cannot be interleaved here: {reason}")


def _once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Register vLLM's CPU kernels once a process, not once an engine.

    Registering scans every loaded module and fails on llvmlite, which prompt lookup loads.
    """
    done = False

    def register_triton_kernel_overrides(*_: Any) -> None:
        nonlocal done
        if not done:
            original()
            done = True

    return register_triton_kernel_overrides


HOOK = "nwor_hook"
"""Attribute of a worker that holds its runner's hook."""

RANGES = "nwor_ranges"
"""Attribute of a worker that holds its NVTX ranges, which are off unless asked for."""

NOT_ATTACHED = "nwor_not_attached"
"""Attribute of a worker that holds why it has no hook, if one was asked for."""


def attach_hook(worker: Any) -> None:
    """Wrap the worker's runner; raises nothing. After an error NOT_ATTACHED says why."""
    try:
        settings = read_settings()
        if settings is None:
            return
        in_harness = hasattr(worker, "nwor_status")  # its extension asks each engine for its hook
        if worker.vllm_config.speculative_config is None and not in_harness:
            logger.warning("nwor: nothing is staged without --speculative-config")
            return
        attachment = _Attachment(worker, settings)
        reason = attachment.run()
        if reason is None:
            return
        if attachment.fault is None:
            logger.error("nwor-bench is not attached because of %s", reason)
        setattr(worker, NOT_ATTACHED, f"{reason} ({attachment.fault or 'see that rank'})")
        metrics.publish_refusal(reason, worker, settings)
    except Exception as fault:  # the vote itself, vLLM's configuration, or the metrics
        if not hasattr(worker, NOT_ATTACHED):
            setattr(worker, NOT_ATTACHED, f"{_name(fault)} ({fault})")
        logger.exception("nwor-bench could not be attached")


class _Attachment:
    """The steps of attaching; the ranks vote between them, so that none waits for another.

    Attributes:
        fault: this rank's error, already logged.
    """

    def __init__(self, worker: Any, settings: PluginSettings):
        self.fault: Exception | None = None
        self._worker = worker
        self._settings = settings
        self._vote = RankVote.of_worker()
        self._hook: RunnerHook
        self._ranges: WindowRanges
        self._live: LiveTraffic | None = None
        self._undo: list[Callable[[], None]] = []

    def run(self) -> str | None:
        """Attach; None, or the reason why it is not attached."""
        reason = self._vote.settle(self._try(self._make))
        if reason is not None:
            return reason
        for step in (self._hook.agree, self._wrap, self._switch_on):
            reason = self._vote.settle(self._try(step))
            if reason is not None:
                for undo in reversed(self._undo):
                    self._try(undo)
                return reason
        setattr(self._worker, RANGES, self._ranges)
        setattr(self._worker, HOOK, self._hook)
        return None

    def _make(self) -> None:
        self._hook = make_hook(self._worker.model_runner, self._settings)

    def _wrap(self) -> None:
        metrics.publish(self._hook, self._worker, self._settings)
        if self._settings.interleave or self._settings.drafts:
            from nwor_bench.plugin.live import live_traffic  # scipy takes a second

            self._live = live_traffic(self._hook, self._worker, self._settings)
            self._undo.append(self._live.undo)
        if self._live is not None or metrics.folder_of() is not None:
            reading = self._hook.count_without_waiting()  # else a harness drains them
            self._undo.append(reading.undo)
            reading.apply()
        self._ranges = WindowRanges(self._hook)
        self._undo += [lambda: self._ranges.switch(False), self._hook.detach]
        self._ranges.switch(nvtx_ranges.wanted())
        self._hook.attach()

    def _switch_on(self) -> None:
        if self._live is not None:
            self._live.start()
        else:
            self._hook.set_modes(self._settings.nwor_mode, self._settings.scv_mode)

    def _try(self, step: Callable[[], Any]) -> str | None:
        """Run a step; an error is logged with its traceback and becomes a fallback reason."""
        try:
            step()
        except Exception as fault:
            logger.exception("nwor-bench is not attached; vLLM runs without it")
            self.fault = self.fault or fault
            return _name(fault)
        return None


def make_hook(runner: Any, settings: PluginSettings) -> RunnerHook:
    """The hook for vLLM's V1 or V2 runner; each is imported only if it is used.

    Raises PatchError if this vLLM lacks what every hook needs.
    """
    reason = lost(Feature.WINDOWS)
    if reason is not None:
        raise PatchError.at("cannot attach", reason)
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if isinstance(runner, GPUModelRunner):
        from nwor_bench.plugin.runner_v1.hook import V1RunnerHook

        return V1RunnerHook(runner, settings)
    from nwor_bench.plugin.runner_v2.hook import V2RunnerHook

    return V2RunnerHook(runner, settings)


def _name(fault: Exception) -> str:
    return f"attach:{type(fault).__name__}"
