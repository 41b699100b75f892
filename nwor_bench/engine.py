"""The persistent engine: one vLLM per pair, modes switched live. Alone here imports vLLM."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from pydantic import ValidationError

from nwor_bench.config import SweepSpec
from nwor_bench.engine_log import log_to_file
from nwor_bench.errors import BenchError, ConfigError, EngineError
from nwor_bench.pairs import ResolvedPair
from nwor_bench.profiling.pm_sampling import check_counters
from nwor_bench.records import Cell
from nwor_bench.versions import require_supported_vllm

WORKER_EXTENSION = "nwor_bench.plugin.worker.NworWorkerExtension"

_COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Sampling:
    """How a batch samples. The engine's random stream starts anew from `seed` every batch."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    ignore_eos: bool


@dataclass(frozen=True)
class VllmCounters:
    """vLLM's own spec_decode counters (a difference over one batch)."""

    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def minus(self, before: "VllmCounters") -> "VllmCounters":
        """What was counted since `before`."""
        earlier = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return VllmCounters(
            self.num_drafts - before.num_drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(
                now - then for now, then in zip(self.accepted_per_position, earlier, strict=True)
            ),
        )


@dataclass(frozen=True)
class BatchOutput:
    """What one batch returned and counted. `windows` are the worker's plain dicts.

    `counter_facts` says how well what counters put into `windows` is known; None without any.
    """

    token_ids: tuple[tuple[int, ...], ...]
    latency_ms: float
    windows: list[dict[str, Any]]
    counters: VllmCounters
    scv_counters: dict[str, int] = field(default_factory=dict)
    counter_facts: dict[str, Any] | None = None


class Engine(Protocol):
    """What the sweep needs of an engine."""

    def status(self) -> dict[str, Any]:
        """Facts for run.json: device, layers, block size, what is attached."""

    def set_modes(self, cell: Cell) -> None:
        """Switch both modes live."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> BatchOutput:
        """Run one batch to its end from an empty prefix cache."""

    def set_probe(self, on: bool) -> None:
        """Time each window's phases on the device, if `status()["has_probe"]`."""

    def set_counters(self, kind: str, on: bool) -> None:
        """Count each window's DRAM bytes ("counters") or CUDA calls ("launches"), or stop."""

    def close(self) -> None:
        """Release the engine's memory."""


class VllmEngine:
    """Stock vLLM in this process, with the plugin attached.

    Args:
        pair: ready models.
        spec: the sweep.
        log: file that receives vLLM's own messages; None leaves them on the terminal.

    Raises:
        ConfigError: vLLM refuses the configuration, or the device is not supported.
        EngineError: vLLM did not start.
    """

    starts = 0
    """Engines started in this process; a sweep of one pair must count one."""

    def __init__(self, pair: ResolvedPair, spec: SweepSpec, log: Path | None = None):
        self._log = log
        started = time.perf_counter()
        _set_environment(spec.dtype or pair.dtype)
        with log_to_file(log):
            self._llm = _start(pair, spec)
        self.start_seconds = time.perf_counter() - started
        VllmEngine.starts += 1
        self._counting: str | None = None
        self._vllm = require_supported_vllm()

    def status(self) -> dict[str, Any]:
        """Device, layers, block size, CUDA graphs, number of starts and what is attached."""
        starts = {"start_count": VllmEngine.starts, "start_seconds": round(self.start_seconds, 2)}
        return {**self._rpc("nwor_status"), "vllm": self._vllm, **starts}

    def set_modes(self, cell: Cell) -> None:
        """Switch both modes live; call it between batches."""
        self._rpc("nwor_set_modes", str(cell.nwor_mode), str(cell.scv_mode))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> BatchOutput:
        """Run one batch to its end from an empty prefix cache; counters are read around it."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            ignore_eos=sampling.ignore_eos,
            detokenize=False,
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM could not reset its prefix cache between batches")
        self._rpc("nwor_seed", sampling.seed)
        self._rpc("nwor_drain")  # windows of an interrupted batch do not belong to this one
        before = self._read_counters()
        if self._counting:
            self._rpc("nwor_start_counters", self._counting)
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        latency_ms = (time.perf_counter() - started) * 1e3
        lengths = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        drained = self._rpc("nwor_drain", lengths)
        if drained["device_errors"]:
            raise EngineError(f"a commit was refused on the device: {drained['device_errors']}")
        windows = drained["windows"]
        facts = self._add_counters(self._counting, windows) if self._counting else None
        return BatchOutput(
            token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
            latency_ms=latency_ms,
            windows=windows,
            counters=self._read_counters().minus(before),
            scv_counters=drained["scv_counters"],
            counter_facts=facts,
        )

    def set_hooks(self, attached: bool) -> None:
        """Wrap or unwrap the runner, to measure what the hooks themselves cost."""
        self._rpc("nwor_set_hooks", attached)

    def set_nvtx(self, on: bool) -> None:
        """Put NVTX ranges around windows, or take them away."""
        self._rpc("nwor_set_nvtx", on)

    def set_probe(self, on: bool) -> None:
        """Time each window's phases on the device, or stop; costs host time (see the report)."""
        self._rpc("nwor_set_probe", on)

    def set_counters(self, kind: str, on: bool) -> None:
        """Count each window's DRAM bytes or CUDA calls, or stop (first rank's)."""
        self._rpc("nwor_set_counters", kind, on)
        self._counting = kind if on else None

    def _add_counters(self, kind: str, windows: list[dict[str, Any]]) -> dict[str, Any]:
        """Put what was counted into the windows; how well it is known."""
        taken = self._rpc("nwor_take_counters", kind)
        if len(taken["windows"]) != len(windows):
            raise EngineError(
                f"{len(windows)} windows ran and {len(taken['windows'])} were marked for "
                f"{kind}: what was counted cannot be told apart"
            )
        for window, counted in zip(windows, taken["windows"], strict=True):
            window.update(counted)
        return dict(taken["facts"])

    def close(self) -> None:
        """Shut the engine core down and let go of its memory."""
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    def _rpc(self, method: str, *args: Any) -> Any:
        """Call a worker method; the first rank's answer."""
        return self._llm.collective_rpc(method, args=args)[0]

    def _read_counters(self) -> VllmCounters:
        found: dict[str, int] = {}
        per_position: tuple[int, ...] = ()
        for metric in self._llm.get_metrics():
            if metric.name in _COUNTERS:
                found[_COUNTERS[metric.name]] = int(metric.value)
            elif metric.name == _PER_POSITION:
                per_position = tuple(int(value) for value in metric.values)
        return VllmCounters(**found, accepted_per_position=per_position)


def _set_environment(dtype: str) -> None:
    """Switch the plugin on and keep the engine core in this process.

    Which model runner serves a GPU is vLLM's choice, or VLLM_USE_V2_MODEL_RUNNER's.
    """
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NWOR_MODE": "off",
        "VLLM_SCV_MODE": "off",
        "VLLM_NWOR_METRICS": "0",  # the sweep has its own
        "VLLM_NO_USAGE_STATS": "1",
    }
    if on_cpu():
        fixed["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    elif dtype == "float32":
        # Triton would round float32 to tf32, three digits: vLLM's attention and ours then differ
        # by enough to turn a close call between two tokens (seen on an H200, a logit gap of 1e-4).
        fixed["TRITON_F32_DEFAULT"] = "ieee"
    os.environ.update(fixed)


def on_cpu() -> bool:
    """Does the installed vLLM run on the CPU?"""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _has_gpu() -> bool:
    """Can this vLLM run on a CUDA device of this machine?"""
    import torch

    return not on_cpu() and torch.cuda.is_available()


def check_arguments(pair: ResolvedPair, spec: SweepSpec) -> None:
    """Have vLLM judge the configuration before anything is started or written.

    Raises ConfigError with vLLM's own reason if it refuses.
    """
    _set_environment(spec.dtype or pair.dtype)
    if spec.dram_counters:
        check_counters(_has_gpu)
    if spec.launch_counts and not _has_gpu():
        raise ConfigError.for_field(
            "--launch-counts", True, "there is no CUDA device here, so there is nothing to count"
        )
    with TemporaryDirectory() as folder, log_to_file(Path(folder) / "vllm.log"), _refusals():
        from vllm import EngineArgs

        EngineArgs(**engine_arguments(pair, spec)).create_engine_config()


def _start(pair: ResolvedPair, spec: SweepSpec) -> Any:
    try:
        with _refusals():
            from vllm import LLM

            return LLM(**engine_arguments(pair, spec))
    except BenchError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what vLLM raises for a configuration that it does not take into a ConfigError."""
    try:
        yield
    except BenchError:
        raise
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"vLLM refuses this configuration: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What vLLM says, in one line and without the objects that its validator prints."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        where = [".".join(map(str, fault["loc"])) for fault in faults]
        what = [fault["msg"].removeprefix("Value error, ") for fault in faults]
        return "; ".join(f"{a}: {b}" if a else b for a, b in zip(where, what, strict=True))
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[:3])


def engine_arguments(pair: ResolvedPair, spec: SweepSpec) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`: the sweep's own, then `--engine-args` on top."""
    from nwor_bench.memory import kv_cache_bytes

    scenario = spec.scenario
    config = {**pair.speculative_config(scenario.draft_tokens), **(spec.speculative_config or {})}
    arguments: dict[str, Any] = {
        "model": pair.target,
        "dtype": spec.dtype or pair.dtype,
        "max_model_len": scenario.max_model_len,
        "max_num_seqs": scenario.requests,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "seed": spec.seed,
        "speculative_config": config,
        "kv_cache_memory_bytes": kv_cache_bytes(pair, spec),
        "enforce_eager": on_cpu(),
        "disable_log_stats": False,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if pair.load_format is not None:
        arguments["load_format"] = pair.load_format
    if spec.block_size is not None:
        arguments["block_size"] = spec.block_size
    return {**arguments, **spec.engine_args}
