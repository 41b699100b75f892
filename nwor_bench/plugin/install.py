"""Put the plugin's two class-level hooks in place: the backend, and the end of warm-up."""

from typing import Any, Callable

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from nwor_bench.errors import ConfigError
from nwor_bench.plugin.patching import Patch

CPU_BACKEND = "nwor_bench.plugin.attention.ReferenceCPUAttentionBackend"

_worker_patch: Patch | None = None


def install() -> None:
    """Override the CPU attention backend and attach to every worker after its warm-up.

    Hooks come after warm-up on purpose: warm-up runs on dummy tensors and must not be staged.

    Raises:
        ConfigError: on a platform for which no hook exists yet.
    """
    global _worker_patch
    if _worker_patch is not None:
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
    _worker_patch = Patch(CPUWorker, "compile_or_warm_up_model", _attach_after)
    _worker_patch.apply()


def uninstall() -> None:
    """Give vLLM its own backend and worker back; engines already started keep theirs."""
    global _worker_patch
    if _worker_patch is None:
        return
    _worker_patch.undo()
    _worker_patch = None
    AttentionBackendEnum.CPU_ATTN.clear_override()


def _attach_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(worker: Any) -> Any:
        from nwor_bench.plugin.worker import attach_hook

        result = original(worker)
        attach_hook(worker)
        return result

    return compile_or_warm_up_model
