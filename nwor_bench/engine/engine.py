"""The persistent engine: one vLLM per pair, modes switched live."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nwor_bench.engine.arguments import (
    check_arguments,
    log_to_file,
    set_environment,
    start_llm,
    stderr_to_file,
)
from nwor_bench.engine.kv_cache import VllmKvCache
from nwor_bench.engine.protocol import (
    BatchOutput,
    GreedyOutput,
    KvCache,
    Sampling,
)
from nwor_bench.engine.readings import (
    common_status,
    disagreement,
    read_counters,
    request_acceptance,
    request_times,
)
from nwor_bench.errors import ConfigError, DeviceDiedError, EngineError
from nwor_bench.instruments.draft_counts import CountSwitch
from nwor_bench.instruments.versions import require_supported_vllm
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.cell import ADAPTIVE_VERIFICATION, SHAM
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.fallback_reasons import in_words
from nwor_bench.records.types import AA, Cell
from nwor_bench.records.window import WindowTable, windows_of
from nwor_bench.records.window_order import WindowOrder
from nwor_bench.workload.config import RunSpec

__all__ = ["VllmEngine", "check_arguments"]

_DEAD: list[Any] = []
"""vLLMs whose device failed: to free their tensors would abort the process."""


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

    _draft_counts: CountSwitch | None = None
    """Sets the draft counts; None if the run compares modes."""

    _died: DeviceDiedError | None = None
    """The device's failure; None while it runs."""

    def __init__(self, pair: ResolvedPair, spec: RunSpec, log: Path | None = None):
        self._log = log
        started = time.perf_counter()
        set_environment(spec.dtype or pair.dtype, spec.tensor_parallel_size, spec.worker_variables)
        with log_to_file(log):
            self._llm = start_llm(pair, spec)
        self.start_seconds = time.perf_counter() - started
        VllmEngine.starts += 1
        self._counting = False
        self._kv_cache = VllmKvCache(self._llm, self._rpc_all, self._running)
        if counts := spec.experiment.counts:
            try:
                self._check_draft_counts(pair, spec)
            except ConfigError:
                self.close()
                raise
            self._draft_counts = CountSwitch(
                self._llm.llm_engine.engine_core.engine_core.scheduler,  # in this process
                counts,
            )
        if (spec.speculative_config or {}).get(ADAPTIVE_VERIFICATION):
            self._require_adaptive(pair)
        self._vllm = require_supported_vllm()

    def _require_adaptive(self, pair: ResolvedPair) -> None:
        """Refuse an engine that verifies every draft although it was asked not to."""
        if not self._rpc("nwor_verifies_adaptively"):
            self.close()
            remedy = f"vLLM verifies every draft of {pair.method} here; leave it out"
            raise ConfigError.for_field(ADAPTIVE_VERIFICATION, True, remedy)

    def _check_draft_counts(self, pair: ResolvedPair, spec: RunSpec) -> None:
        """Refuse a drafter that does not follow the scheduler, and staging that cannot be."""
        constant = self._rpc("nwor_constant_drafter")
        if constant is not None:
            raise ConfigError.for_field(
                "--method",
                pair.method,
                f"vLLM's {constant} drafts {spec.scenario.draft_tokens} tokens at every draft "
                "count, so smaller ones would look too slow; write --engines",
            )
        unavailable = self._rpc("nwor_status")["staging_unavailable"]
        if spec.stages and unavailable is not None:
            raise ConfigError.for_field(
                "--nwor-modes",
                ",".join(spec.nwor_modes),
                f"no window can be staged here ({in_words(unavailable)}); write off, or ask "
                "`nwor-bench plan MODEL` which models stage",
            )

    def status(self) -> EngineStatus:
        """Device, layers, block size, CUDA graphs, number of starts and what is attached."""
        ours = {
            "vllm": self._vllm,
            "start_count": VllmEngine.starts,
            "start_seconds": round(self.start_seconds, 2),
        }
        return common_status(self._rpc_all("nwor_status")).model_copy(update=ours)

    def set_modes(self, cell: Cell) -> None:
        """Switch both modes live; call it between batches.

        The first switch to stage may capture CUDA graphs, of which vLLM draws progress bars.
        """
        with stderr_to_file(self._log):
            self._rpc("nwor_set_modes", str(cell.nwor_mode), str(cell.scv_mode))
        if self._draft_counts is not None:
            self._draft_counts.fix(cell.fixed_drafts)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keep_prefix_cache: bool = False,
    ) -> BatchOutput:
        """See `Engine`; counters are read before and after."""
        params = _vllm_params(sampling)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        if not keep_prefix_cache:
            self._reset_prefix_cache()
        self._rpc("nwor_seed", sampling.seed)
        self._rpc("nwor_drain")  # windows of an interrupted batch do not belong to this one
        self._kv_cache.before_batch()
        before = read_counters(self._llm)
        if self._counting:
            self._rpc("nwor_start_counters")
        started = time.perf_counter()
        with self._running():
            outputs = self._llm.generate(inputs, params, use_tqdm=False)
        latency_ms = (time.perf_counter() - started) * 1e3
        self._kv_cache.last_batch(outputs)
        ranks = self._drain(outputs)
        table: WindowTable = ranks[0]["windows"]
        counted = self._take_counters(table) if self._counting else {}
        return BatchOutput(
            token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
            latency_ms=latency_ms,
            windows=windows_of(table | counted),
            counters=read_counters(self._llm).minus(before),
            scv_counters=ranks[0]["scv_counters"],
            rank_disagreement=disagreement([rank["windows"] for rank in ranks]),
            request_times=request_times(outputs),
            request_acceptance=request_acceptance(outputs, ranks[0]["request_acceptance"]),
        )

    def interleave(self, order: WindowOrder) -> None:
        """Interleave the cells in the next batch, window by window.

        Modes that were never set are set first, which may capture CUDA graphs.
        """
        shams = self._draft_counts is None  # the A/A arm of draft counts has nothing to switch
        modes = [
            (SHAM if shams and cell.arm == AA else str(cell.nwor_mode), str(cell.scv_mode))
            for cell in order.cells
        ]
        with stderr_to_file(self._log):
            if self._draft_counts is None:
                lengths = dict(order.run_lengths)
                self._rpc("nwor_interleave", modes, (list(order.pairs), order.seed, lengths))
            else:
                self._rpc("nwor_interleave", modes, None)
                self._draft_counts.interleave(order)

    def stop_interleaving(self) -> list[dict[str, dict[str, int]]]:
        """Return to mode off; each cell's SCV counters and fallbacks, in the order's cells."""
        if self._draft_counts is not None:
            self._draft_counts.fix(0)
        return list(self._rpc("nwor_stop_interleaving"))

    def decode_greedily(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        ignore_eos: bool,
        top: int = 0,
        keep_prefix_cache: bool = False,
        nudged: bool = False,
    ) -> tuple[GreedyOutput, ...]:
        """Greedy outputs in the present modes, kept out of the next batch's records.

        Args:
            prompts: token ids; more prompts than the engine runs at once wait in its queue.
            max_new_tokens: of each prompt.
            ignore_eos: continue after an end-of-sequence token.
            top: number of likeliest tokens to return at each output position.
            keep_prefix_cache: take contexts from the prefix cache instead of emptying it first.
            nudged: every layer's attention returns values that are off by one rounding step.
        """
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=length,
                temperature=0.0,
                ignore_eos=ignore_eos,
                detokenize=False,
                logprobs=top or None,
            )
            for length in max_new_tokens
        ]
        if not keep_prefix_cache:
            self._reset_prefix_cache()
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        if nudged:
            self._rpc_all("nwor_nudge_attention", True)
        try:
            with self._running():
                outputs = self._llm.generate(inputs, params, use_tqdm=False)
        finally:
            if nudged:
                self._rpc_all("nwor_nudge_attention", False)
        self._drain(outputs)
        return tuple(_greedy_output(output.outputs[0]) for output in outputs)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Raise DeviceDiedError if the device fails while vLLM runs, and at every call after it:
        there is no engine then."""
        import torch

        if self._died is not None:
            raise self._died
        try:
            yield
        except torch.AcceleratorError as error:
            _DEAD.append(self.__dict__.pop("_llm"))
            counts = "; vLLM 0.32 may do so when draft counts change (docs/worth.md)"
            known = counts if self._draft_counts is not None else ""
            problem = f"{str(error).splitlines()[0]}{known}. What was measured is kept"
            self._died = DeviceDiedError.at("vLLM died", problem, str(error))
            raise self._died from error

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM could not reset its prefix cache between batches")

    def _drain(self, outputs: Sequence[Any]) -> list[dict[str, Any]]:
        """Every rank's windows of a finished batch; raises EngineError if a commit was refused."""
        lengths = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        ranks = self._rpc_all("nwor_drain", lengths)
        refused = [error for rank in ranks for error in rank["device_errors"]]
        if refused:
            raise EngineError.at("a commit was refused on the device", str(refused), refused)
        return ranks

    def set_hooks(self, attached: bool) -> None:
        """Wrap or unwrap the runner, to measure what the hooks themselves cost."""
        self._rpc("nwor_set_hooks", attached)

    def set_nvtx(self, on: bool) -> None:
        """Put NVTX ranges around windows, or take them away."""
        self._rpc("nwor_set_nvtx", on)

    def set_counters(self, on: bool) -> None:
        """Count each window's DRAM bytes, or stop (first rank's)."""
        self._rpc("nwor_set_counters", on)
        self._counting = on

    def watch_writes(self, on: bool) -> list[dict[str, int]]:
        """Watch staging's writes, or stop and return each rank's counts since the start."""
        return self._rpc_all("nwor_watch_writes", on)

    def check_layers(self, requests: int | None) -> list[list[dict[str, Any]]]:
        """See `Engine`; the first call in a mode may capture a CUDA graph."""
        with stderr_to_file(self._log):
            return self._rpc_all("nwor_check_layers", requests)

    def kv_cache(self) -> KvCache:
        """The KV cache of every rank, to be read back between batches."""
        return self._kv_cache

    def _take_counters(self, table: WindowTable) -> WindowTable:
        """Columns of the counts of these windows."""
        columns: WindowTable = self._rpc("nwor_take_counters")
        windows, counted = len(table["num_reqs"]), len(next(iter(columns.values())))
        if counted != windows:
            raise EngineError(
                f"{windows} windows ran and {counted} were counted: "
                "counts cannot be assigned to windows"
            )
        return columns

    def close(self) -> None:
        """Shut the engine core down and release its memory."""
        self._kv_cache.close()
        self._draft_counts = None
        llm = self.__dict__.pop("_llm", None)
        if llm is None:
            return
        vars(llm).pop("generate", None)  # of an adapter; it refers to the engine
        try:
            if llm.llm_engine.vllm_config.parallel_config.world_size == 1:  # in this process
                llm.collective_rpc("nwor_leave")
        finally:
            llm.llm_engine.engine_core.shutdown()

    def _rpc(self, method: str, *args: Any) -> Any:
        """Call a worker method on every rank; the first one's answer."""
        return self._rpc_all(method, *args)[0]

    def _rpc_all(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method; the answer of every rank, in their order."""
        with self._running():
            return list(self._llm.collective_rpc(method, args=args))


def _greedy_output(completion: Any) -> GreedyOutput:
    """From vLLM's CompletionOutput. Raises EngineError if a token has no log probabilities."""
    rows = completion.logprobs
    if rows is not None and len(rows) != len(completion.token_ids):
        raise EngineError(
            f"vLLM returned {len(rows)} rows of log probabilities for "
            f"{len(completion.token_ids)} tokens"
        )
    top = tuple({token: float(entry.logprob) for token, entry in row.items()} for row in rows or ())
    return GreedyOutput(tuple(completion.token_ids), top)


def _vllm_params(sampling: Sampling) -> Any:
    """vLLM's `SamplingParams`."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
    )
