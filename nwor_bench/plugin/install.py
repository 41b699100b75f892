"""Put the plugin's class-level hooks in place: the backend, and the end of warm-up."""

import os
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from nwor_bench.errors import ConfigError
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.settings import PluginSettings

CPU_BACKEND = "nwor_bench.plugin.runner_v1.cpu_attention.ReferenceCPUAttentionBackend"
"""Our backend in place of vLLM's on a CPU."""

_patches: PatchSet | None = None


def install(settings: PluginSettings) -> None:
    """Attach to every worker after its warm-up; on a CPU override the attention backend too.

    Hooks come after warm-up on purpose: warm-up runs on dummy tensors and must not be staged.
    On a GPU no class of vLLM's attention is replaced.

    Raises:
        ConfigError: on a platform for which no hook exists, or which cannot stage as asked.
    """
    global _patches
    if _patches is not None:
        return
    if current_platform.is_cpu():
        if settings.needs_gpu:
            raise ConfigError.for_field(
                settings.needs_gpu,
                os.environ.get(settings.needs_gpu, ""),
                "it needs a CUDA device, and this vLLM runs on the CPU; unset it",
            )
        _patches = PatchSet(_cpu_patches())
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    elif current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        _patches = PatchSet([Patch(Worker, "compile_or_warm_up_model", _attach_after)])
    else:
        raise ConfigError.for_field(
            "device",
            current_platform.device_name,
            "nwor-bench hooks vLLM on NVIDIA GPUs and on CPUs; unset VLLM_NWOR_MODE and "
            "VLLM_SCV_MODE to run vLLM without it",
        )
    _patches.apply()


def _cpu_patches() -> list[Patch]:
    from vllm.v1.worker.cpu_worker import CPUWorker

    return [
        Patch(CPUWorker, "compile_or_warm_up_model", _attach_after),
        Patch(type(current_platform), "register_triton_kernel_overrides", _once),
    ]


def _attach_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(worker: Any) -> Any:
        from nwor_bench.plugin.attaching import attach_hook

        result = original(worker)
        attach_hook(worker)
        return result

    return compile_or_warm_up_model


def _once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Register vLLM's CPU kernels once a process, not once an engine.

    Registering (from vLLM 0.31 on) scans every loaded module, and the scan fails on llvmlite, which
    prompt lookup loads: without this the second engine of a process would not start.
    """
    done = False

    def register_triton_kernel_overrides(*_: Any) -> None:
        nonlocal done
        if not done:
            original()
            done = True

    return register_triton_kernel_overrides
