"""A device that fails while vLLM runs: one error, no attempt to free what it held, exit code 1."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.kv_cache import VllmKvCache
from nwor_bench.errors import DeviceDiedError


class Vllm:
    """Fails as vLLM does once its device failed, and notices if it is freed."""

    freed = 0

    def generate(self, *args: Any, **kwargs: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    def reset_prefix_cache(self) -> bool:
        return True

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        if method == "nwor_watch_writes":
            self.generate()
        return [{}]

    def __del__(self) -> None:
        type(self).freed += 1  # the module may be gone by then


@pytest.mark.parametrize("draft_counts", [None, object()])
def test_a_failed_device_is_one_error_and_nothing_is_freed(draft_counts: object) -> None:
    engine = VllmEngine.__new__(VllmEngine)
    engine._llm, engine._draft_counts = Vllm(), draft_counts
    with pytest.raises(DeviceDiedError) as caught, engine._running():
        engine._llm.generate()
    message = str(caught.value)
    assert message.startswith("vLLM died: CUDA error: an illegal memory access was encountered")
    assert message.endswith("What was measured is kept")
    assert "more" not in message
    assert ("when draft counts change" in message) == (draft_counts is not None)
    caught.value.__cause__ = None
    assert not hasattr(engine, "_llm")
    assert not Vllm.freed


@pytest.mark.slow
def test_a_device_that_fails_in_the_gate_is_the_same_error_for_every_call_after_it() -> None:
    """Prefills and workers' methods fail as batches do; what is undone then hides nothing."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._llm = Vllm()
    cache = engine._kv_cache = VllmKvCache(engine._llm, engine._rpc_all, engine._running)
    cache.watch(True)
    with pytest.raises(DeviceDiedError, match="illegal memory access") as caught:
        cache.prefill([[1, 2]], nudged=True)
    for call in (lambda: cache.watch(False), engine.stop_interleaving, lambda: cache.prefill([])):
        with pytest.raises(DeviceDiedError) as again:
            call()
        assert again.value is caught.value
    engine.close()

    engine = VllmEngine.__new__(VllmEngine)
    engine._llm = Vllm()
    with pytest.raises(DeviceDiedError, match="illegal memory access"):
        engine.watch_writes(True)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_engine_that_ends_gives_back_what_is_wrapped(processes: int) -> None:
    """Also if that fails, the engine is shut down; processes of their own just end."""
    called: list[str] = []

    def fail(method: str) -> None:
        called.append(method)
        raise RuntimeError(method)

    engine = VllmEngine.__new__(VllmEngine)
    core = SimpleNamespace(shutdown=lambda: called.append("shutdown"))
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=processes))
    llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)
    engine._llm = SimpleNamespace(collective_rpc=fail, llm_engine=llm_engine)
    engine._kv_cache = VllmKvCache(engine._llm, engine._rpc_all, engine._running)
    with pytest.raises(RuntimeError) if processes == 1 else nullcontext():
        engine.close()
    assert called == ["nwor_leave"] * (processes == 1) + ["shutdown"]


def test_the_process_ends_with_code_1_though_what_is_freed_would_abort_it() -> None:
    script = (
        "import atexit, os\n"
        "from nwor_bench.cli import app\n"
        "from nwor_bench.errors import DeviceDiedError\n"
        "def dies(**_): raise DeviceDiedError.at('vLLM died', 'CUDA error')\n"
        "app.app = dies\n"
        "atexit.register(os.abort)\n"
        "app.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "nwor-bench: vLLM died: CUDA error\n"
