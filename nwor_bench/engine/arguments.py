"""vLLM's arguments, environment and log, checked and set before the engine starts."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from nwor_bench.errors import BenchError, ConfigError, EngineError
from nwor_bench.instruments.draft_counts import SAFE_GRAPHS, schedule_of
from nwor_bench.instruments.pm_sampling import check_counters
from nwor_bench.models.adapter import lora_arguments
from nwor_bench.models.pairs import ResolvedPair, read_model_config, refused_config
from nwor_bench.models.recurrent import STAGED_KINDS, recurrent_layers
from nwor_bench.records.cell import AA, ADAPTIVE, Drafts
from nwor_bench.records.state_slots import FIELD, check_one_slot, one_slot
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.experiment import ACCEPTANCE_RATES, COUNT_BY_SIZE
from nwor_bench.workload.run_spec import ACCEPTANCE_LENGTH, Counters, variables_of


@contextmanager
def log_to_file(path: Path | None) -> Iterator[None]:
    """Send vLLM's log to `path` permanently, and all of stderr while inside.

    None changes nothing.
    """
    if path is not None:
        _log_vllm_to(path)
    with stderr_to_file(path):
        yield


@contextmanager
def stderr_to_file(path: Path | None) -> Iterator[None]:
    """Send stderr to `path` while inside; None changes nothing.

    Libraries below vLLM write to the file descriptor, so the descriptor is redirected.
    """
    if path is None:
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def _log_vllm_to(path: Path) -> None:
    """A file handler in place of vLLM's own handlers, which it must not configure again."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    file_handler = logging.FileHandler(path)
    file_handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(file_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


_REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError)
"""Errors that vLLM raises for a configuration that it does not support."""

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"

WORKER_EXTENSION = "nwor_bench.plugin.worker.NworWorkerExtension"

DUMMY_LOADERS = {"dummy": "nwor_dummy"}
"""vLLM's load format for a pair without weights: the worker extension's loader, whose values make
attention matter (plugin/dummy_weights.py). `--engine-args` can still choose vLLM's own."""


def set_environment(
    dtype: str, ranks: int = 1, worker_variables: Mapping[str, str] | None = None
) -> None:
    """Switch the plugin on and keep the engine core in this process.

    vLLM chooses the model runner on a GPU, unless VLLM_USE_V2_MODEL_RUNNER is set.

    Args:
        dtype: data type of the models.
        ranks: tensor-parallel ranks.
        worker_variables: the run's environment variables, see `RunSpec.worker_variables`.
    """
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NWOR_MODE": "off",
        "VLLM_SCV_MODE": "off",
        "VLLM_NWOR_DRAFTS": "",  # for servers; a run of draft counts has its own order
        "VLLM_NWOR_BESIDE_PREFILL": "stage",  # the gate is to see what is staged there
        **(worker_variables or {}),
        "VLLM_NWOR_METRICS": "0",  # the sweep has its own
        "VLLM_NO_USAGE_STATS": "1",
    }
    if on_cpu():
        fixed["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # MKL's products of a few rows differ in their last bits with the alignment of the inputs
        # and the number of threads, and the gate compares bits (`KvGate`).
        fixed["MKL_CBWR"] = os.environ.get("MKL_CBWR", "AUTO,STRICT")
        given = os.environ.get(_BINDING, "auto")
        # A binding for another number of ranks is what an earlier engine of this process had.
        if given == "auto" or (given != "nobind" and given.count("|") + 1 != ranks):
            fixed[_BINDING] = _processors_of_ranks(ranks)
    else:
        if ranks > 1:
            # A process that has asked CUDA for its devices, as this one has, must not be forked.
            fixed["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if dtype == "float32":
            # Triton would round float32 to tf32, three digits: vLLM's attention and ours then
            # differ by enough to turn a close call between two tokens (seen on an H200, a logit
            # gap of 1e-4).
            fixed["TRITON_F32_DEFAULT"] = "ieee"
    os.environ.update(fixed)


def _processors_of_ranks(ranks: int) -> str:
    """The processors that this process may use, shared out: "0,1|2,3" for two ranks of four.

    One rank gets vLLM's own choice, "auto"; for more that is a NUMA node each, or a refusal. There
    are as many processors as ranks at least (`preflight.check_flags`).
    """
    if ranks == 1:
        return "auto"
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // ranks
    shares = [processors[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in shares)


def on_cpu() -> bool:
    """True if the installed vLLM runs on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _has_gpu() -> bool:
    """True if this vLLM can run on a CUDA device of this machine."""
    import torch

    return not on_cpu() and torch.cuda.is_available()


def check_arguments(pair: ResolvedPair, spec: RunSpec) -> None:
    """Have vLLM check the configuration before anything is started or written; `run.prepare` has
    checked what needs no vLLM.

    Raises ConfigError with vLLM's own reason if it refuses.
    """
    if spec.counters is Counters.DRAM:
        check_counters(_has_gpu)
    specs = {arm: engine_spec for arm, engine_spec in spec.engine_specs.items() if arm != AA}
    configs = {arm: _check_engine(pair.of_arm(arm), own) for arm, own in specs.items()}
    for arm in configs:
        compared = arm is not None and spec.against and not variables_of(spec.against)
        if compared and _settings(configs[None]) == _settings(configs[arm]):
            remedy = "vLLM makes the same configuration of it as without; write another"
            raise ConfigError.for_field("--against", str(arm), remedy)
    adaptive = configs.get(Drafts(ADAPTIVE))
    if adaptive is not None and not adaptive.use_v2_model_runner:
        remedy = "vLLM verifies adaptively on its V2 runner, and this runs on V1; leave it out"
        raise ConfigError.for_field("--adaptive-verification", True, remedy)


def _check_engine(pair: ResolvedPair, spec: RunSpec) -> Any:
    """Have vLLM check one engine's configuration; returns it. The engine's own variables are given
    back: processes of other engines inherit this one's."""
    own = variables_of(spec.engine_args)
    before = {name: os.environ[name] for name in own if name in os.environ}
    set_environment(spec.dtype or pair.dtype, spec.tensor_parallel_size, spec.worker_variables)
    try:
        return _checked_config(pair, spec)
    finally:
        for name in own:
            del os.environ[name]
        os.environ.update(before)


def _checked_config(pair: ResolvedPair, spec: RunSpec) -> Any:
    with TemporaryDirectory() as folder, log_to_file(Path(folder) / "vllm.log"), _refusals():
        from vllm import EngineArgs

        _check_configs(pair, bool(spec.engine_args.get("trust_remote_code")))
        try:
            config = EngineArgs(**engine_arguments(pair, spec)).create_engine_config()
        except (BenchError, *_REFUSALS):
            raise
        except Exception as error:  # what reads a model's files raises errors of any kind
            kind = type(error).__name__
            raise ConfigError.at(
                f"vLLM refuses this configuration of the pair {pair.name}",
                f"{kind}: {_reason(error)}",
            ) from error
    if _has_gpu():
        _check_step_tokens(config)
    if one_slot(config.additional_config):
        check_one_slot(config, spec.worker_variables["VLLM_NWOR_MODE"])
        _check_states(pair)
    return config


def _check_states(pair: ResolvedPair) -> None:
    """Refuse one state slot for a target whose states are not staged."""
    layers = recurrent_layers(read_model_config(pair.target) or {})
    kind = None if layers is None else layers.state.kind
    if kind not in STAGED_KINDS:
        why = "it has no recurrent layers" if kind is None else f"its layers are of {kind}"
        remedy = f"states of {', '.join(STAGED_KINDS)} are staged, and {why}; leave it out"
        raise ConfigError.for_field(f"--against: {FIELD}", 1, remedy)


def _settings(config: Any) -> dict[str, str]:
    """Every setting of a VllmConfig, but not who chose it, nor what is drawn anew each time."""
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    reprs = {name: repr(part) for name, part in parts.items() if not is_dataclass(part)}
    for name, part in parts.items():
        if is_dataclass(part):
            reprs |= {f"{name}.{f.name}": repr(getattr(part, f.name, None)) for f in fields(part)}
    others = ("instance_id", "user_specified")
    return {name: value for name, value in reprs.items() if not any(o in name for o in others)}


def _check_step_tokens(config: Any) -> None:
    """Refuse steps larger than all requests together: vLLM's warm-up then dies on a GPU.

    vLLM 0.32 shares out the tokens of its largest step among `max_num_seqs` dummy requests
    (`GPUModelRunner._dummy_run`), and takes for granted that none gets more than `max_model_len`.
    A longer one reads past its row of the block table: an illegal memory access. vLLM itself
    only warns ("may lead to unexpected behavior"). Stock vLLM on an H200 with 8 requests of 2,048
    tokens starts with 16,384 tokens a step and dies with 16,640; 65,536 start with 64 requests, or
    with 8 of 8,192.
    """
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    most = scheduler.max_num_seqs * longest
    if scheduler.max_num_batched_tokens > most:
        raise ConfigError.for_field(
            "--engine-args: max_num_batched_tokens",
            scheduler.max_num_batched_tokens,
            f"vLLM's warm-up on a GPU reads past its block table above requests x max_model_len "
            f"({scheduler.max_num_seqs} x {longest}); write at most {most}, or a larger "
            "--max-model-len",
        )


def _check_configs(pair: ResolvedPair, trust_remote_code: bool) -> None:
    """Have vLLM read the config.json of local models: its own message names no file."""
    from vllm.transformers_utils.config import get_config

    for role, model in (("target", pair.target), ("drafter", pair.draft)):
        if model is None or not Path(model).is_dir():
            continue
        try:
            get_config(model, trust_remote_code)
        except Exception as error:  # see above
            raise refused_config(f"pair {pair.name}: {role}", Path(model), error, "vLLM") from error


WITHOUT_TORCHVISION = (
    "its build does not fit PyTorch's: pip uninstall -y torchvision torchaudio torchcodec "
    "(docs/install.md)"
)


def start_llm(pair: ResolvedPair, spec: RunSpec) -> Any:
    """vLLM's `LLM`; raises ConfigError if it refuses, EngineError if it does not start."""
    try:
        with _refusals():
            from vllm import LLM

            # Without torchcodec vLLM keeps an import's error, and with it this frame and its
            # callers': none of them may name the engine, or closing it frees no memory.
            return _with_adapter(LLM(**engine_arguments(pair, spec)), spec.lora)
    except BenchError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if "torchvision" in said:
            said += f"; {WITHOUT_TORCHVISION}"
        raise EngineError.at("vLLM did not start", said) from error


def _with_adapter(llm: Any, lora: str | None) -> Any:
    """The engine, whose requests take this LoRA adapter; None: none."""
    if lora is not None:
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest("adapter", 1, lora)
        llm.generate = partial(llm.generate, lora_request=adapter)
    return llm


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn vLLM's errors on an unsupported configuration into a ConfigError."""
    try:
        yield
    except BenchError:
        raise
    except _REFUSALS as error:
        raise ConfigError.at("vLLM refuses this configuration", _reason(error)) from error


def _reason(error: Exception) -> str:
    """vLLM's message in one line, without the objects that its validator prints."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        where = [".".join(map(str, fault["loc"])) for fault in faults]
        what = [fault["msg"].removeprefix("Value error, ") for fault in faults]
        return "; ".join(f"{a}: {b}" if a else b for a, b in zip(where, what, strict=True))
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[:3])


def _speculation(pair: ResolvedPair, spec: RunSpec) -> dict[str, Any] | None:
    """vLLM's speculative config: the pair's, then the sweep's on top; None without drafts."""
    drafts = spec.scenario.draft_tokens
    if not drafts:
        return None
    given = spec.speculative_config or {}
    config = {**pair.speculative_config(drafts), **given}
    if ACCEPTANCE_RATES in given:
        config.pop(ACCEPTANCE_LENGTH, None)  # the pair's; vLLM takes one of the two
    if counts := spec.experiment.counts:
        config[COUNT_BY_SIZE] = schedule_of(counts)
    if config.keys() & {ACCEPTANCE_LENGTH, ACCEPTANCE_RATES}:  # only this method takes them
        config.setdefault("rejection_sample_method", "synthetic")
    return config


def engine_arguments(pair: ResolvedPair, spec: RunSpec) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`: the sweep's own, then `--engine-args` on top."""
    from nwor_bench.engine.memory import kv_cache_bytes

    scenario = spec.scenario
    arguments: dict[str, Any] = {
        "model": pair.target,
        "dtype": spec.dtype or pair.dtype,
        "max_model_len": scenario.max_model_len,
        "max_num_seqs": scenario.requests,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "seed": spec.seed,
        "speculative_config": _speculation(pair, spec),
        "kv_cache_memory_bytes": kv_cache_bytes(pair, spec),
        "enforce_eager": on_cpu(),
        "disable_log_stats": False,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if recurrent_layers(read_model_config(pair.target) or {}) is not None:
        # vLLM caches a hybrid's prefixes by default, and then reads the state at a block's end,
        # behind any token of a window. No prompt of a sweep is there before its batch.
        arguments["enable_prefix_caching"] = False
    if pair.load_format is not None:
        arguments["load_format"] = DUMMY_LOADERS.get(pair.load_format, pair.load_format)
    if spec.lora is not None:
        arguments |= lora_arguments(spec.lora)
    given = {k: v for k, v in spec.engine_args.items() if k not in variables_of(spec.engine_args)}
    if spec.experiment.counts and not on_cpu():
        graphs = given.get("compilation_config") or {}
        if isinstance(graphs, dict):
            given["compilation_config"] = {"cudagraph_mode": SAFE_GRAPHS, **graphs}
    return deepcopy({**arguments, **given})  # vLLM writes into additional_config
