"""Put the plugin's class-level hooks in place: the backend, and the end of warm-up."""

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from nwor_bench.errors import ConfigError
from nwor_bench.plugin.patching import Patch, PatchSet

CPU_BACKEND = "nwor_bench.plugin.attention.ReferenceCPUAttentionBackend"

_patches: PatchSet | None = None


def install() -> None:
    """Override the CPU attention backend and attach to every worker after its warm-up.

    Hooks come after warm-up on purpose: warm-up runs on dummy tensors and must not be staged.

    Raises:
        ConfigError: on a platform for which no hook exists yet.
    """
    global _patches
    if _patches is not None:
        return
    if not current_platform.is_cpu():
        raise ConfigError.for_field(
            "device",
            current_platform.device_name,
            "this version of nwor-bench hooks vLLM's CPU build; unset VLLM_NWOR_MODE and "
            "VLLM_SCV_MODE to run vLLM alone",
        )
    from vllm.v1.worker.cpu_worker import CPUWorker

    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    _patches = PatchSet(
        [
            Patch(CPUWorker, "compile_or_warm_up_model", _attach_after),
            Patch(type(current_platform), "register_triton_kernel_overrides", _once),
        ]
    )
    _patches.apply()


def uninstall() -> None:
    """Give vLLM its own backend and worker back; engines already started keep theirs."""
    global _patches
    if _patches is None:
        return
    _patches.undo()
    _patches = None
    AttentionBackendEnum.CPU_ATTN.clear_override()


def _attach_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(worker: Any) -> Any:
        from nwor_bench.plugin.worker import attach_hook

        result = original(worker)
        attach_hook(worker)
        return result

    return compile_or_warm_up_model


def _once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Register vLLM's CPU kernels once a process, not once an engine.

    Registering scans every loaded module, and in vLLM 0.32 the scan fails on llvmlite, which
    prompt lookup loads: without this the second engine of a process would not start.
    """
    done = False

    def register_triton_kernel_overrides(*_: Any) -> None:
        nonlocal done
        if not done:
            original()
            done = True

    return register_triton_kernel_overrides
