"""Refusals before pandas, torch, transformers and vLLM are imported, which takes seconds.

`check_run` and `check_sweep` refuse what a command line or a sweep file asks for.
What vLLM itself would refuse later is `engine.arguments.check_arguments`. Names of vLLM's arguments
are read from its source, without importing it.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nwor_bench.engine.memory import groups_with_room, require_memory
from nwor_bench.errors import ConfigError, NotComparableError
from nwor_bench.instruments.contract import Source, vllm_source
from nwor_bench.instruments.device import (
    float32_reason,
    is_cpu_build,
    planned_card,
    uses_gpu,
    visible_gpu_uuids,
)
from nwor_bench.instruments.draft_counts import (
    UNSAFE_GRAPHS,
    WHICH_CHANGE,
    WHY_NOT_ADAPTIVE,
    WHY_UNSAFE,
    changes_count,
)
from nwor_bench.models.adapter import lora_arguments
from nwor_bench.models.arms import check_drafter, with_arms
from nwor_bench.models.config_reader import text_entries
from nwor_bench.models.methods import (
    NOT_ON_CPU,
    WITHOUT_DRAFTER,
    Method,
    check_method,
    mtp_layers,
)
from nwor_bench.models.pairs import (
    ModelPair,
    ResolvedPair,
    check_hub_models,
    load_pair,
    pair_folder,
    resolve_pair,
)
from nwor_bench.models.pairs.local import read_model_config
from nwor_bench.records.cell import ADAPTIVE_VERIFICATION
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import RunStatus, ScvMode
from nwor_bench.workload.experiment import ACCEPTANCE_RATES, WHY_LOSSY
from nwor_bench.workload.method_arms import SPECULATION, entries_of
from nwor_bench.workload.options import flag_of, to_plain
from nwor_bench.workload.run_spec import (
    ACCEPTANCE_LENGTH,
    DEFAULT_PAIR,
    PairChoice,
    RunSpec,
)
from nwor_bench.workload.sweep_file import SweepFile, make_points

TOP = 20
"""Likeliest tokens that the gate asks for at a position; a token beyond them is no tie."""

NO_CUDA = "there is no CUDA device here"


def check_flags(spec: RunSpec) -> None:
    """Refuse flags that cannot run on this machine, or that vLLM does not know.

    Raises ConfigError.
    """
    for refusal in _flags_refused(spec):
        raise refusal


def check_pair(pair: ResolvedPair, spec: RunSpec) -> None:
    """Refuse what the target's config.json rules out, and what vLLM's CPU build accepts and cannot
    run. Raises ConfigError."""
    for refusal in _pair_refused(pair, spec):
        raise refusal


def _flags_refused(spec: RunSpec) -> Iterator[ConfigError]:
    asked = [(flag_of(name), holder, getattr(spec, name)) for name, holder in _ENTRIES_OF_VLLM]
    nested = (spec.against or {}).get(SPECULATION)
    for where, entries in (
        (f"--against: {SPECULATION}", nested),
        *((f"--arm: {name}", entries_of(arm)) for name, arm in (spec.arms or {}).items()),
    ):
        asked.append((where, _SPECULATION, entries))
    for field, holder, entries in asked:
        source = vllm_source() if entries else None
        known = source.fields(holder) if source is not None else frozenset()
        for name in entries or {}:
            if source is not None and name.startswith("VLLM_") and holder == _ENGINE:
                yield from _variable_refused(f"{field}: {name}", entries[name], source)
            elif known and name not in known:
                yield ConfigError.unknown(field, name, known)
    most = spec.engine_args.get("max_logprobs", TOP)
    if isinstance(most, int) and 0 <= most < TOP:
        remedy = f"the gate asks for {TOP} log probabilities a token; leave it out, or write {TOP} "
        yield ConfigError.for_field("--engine-args: max_logprobs", most, f"{remedy}or more")
    if spec.lora is not None:
        lora_arguments(spec.lora)
    yield from _ranks_refused(spec)
    if not uses_gpu():
        yield from _without_gpu_refused(spec)


def _variable_refused(field: str, value: Any, source: Source) -> Iterator[ConfigError]:
    """A variable that vLLM does not have, or that nwor-bench sets itself."""
    name = field.split(": ")[1]
    if source.find(f"envs:{name}") is None:
        yield ConfigError.for_field(field, value, "vLLM has no such environment variable")
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING", "" if uses_gpu() else "VLLM_USE_V2_MODEL_RUNNER"}
    if name in ours:
        yield ConfigError.for_field(field, value, "nwor-bench sets it here; leave it out")


_ENGINE = "engine.arg_utils:EngineArgs"
_SPECULATION = "config.speculative:SpeculativeConfig"
_ENTRIES_OF_VLLM = (
    ("engine_args", _ENGINE), ("against", _ENGINE), ("speculative_config", _SPECULATION),
)  # fmt: skip
"""Options that hold entries of a class of vLLM."""


def _ranks_refused(spec: RunSpec) -> Iterator[ConfigError]:
    """One GPU a rank, unless vLLM is told to use other machines too; one processor on a CPU."""
    ranks = spec.tensor_parallel_size
    elsewhere = spec.engine_args.get("distributed_executor_backend") == "ray" or planned_card()
    if ranks == 1 or elsewhere:
        return
    if uses_gpu():
        here, what = len(visible_gpu_uuids()), "GPU"
    else:
        here, what = len(os.sched_getaffinity(0)), "processor"
    if ranks > here:
        remedy = f"each rank needs a {what}, and there are {here} here"
        yield ConfigError.for_field("--tensor-parallel-size", ranks, remedy)


_ONLY_GPU = {
    "stage_by": "and mode stage has one way to hold drafts; leave stage_by out",
    "--attention": "and windows are attended in one way; leave it out",
    "--counters": "so there is nothing to count; leave it out",
    "--adaptive-verification": "and vLLM verifies adaptively only on a GPU; leave it out",
}
"""Options that only a GPU has a use for, and why they keep their default without one."""


def _without_gpu_refused(spec: RunSpec) -> Iterator[ConfigError]:
    for option, why in _ONLY_GPU.items():
        name = option.removeprefix("--").replace("-", "_")
        value = getattr(spec, name)
        if value != getattr(RunSpec, name):
            yield ConfigError.for_field(option, to_plain(value), f"{NO_CUDA}, {why}")
    chosen = spec.only_cells or ()
    if chosen and all(name.modes[1] is not ScvMode.OFF for name in chosen):
        remedy = f"{NO_CUDA}, and SCV graph and adaptive need one; write stage-off"
        yield ConfigError.for_field("--cells", ",".join(chosen), remedy)


def _pair_refused(pair: ResolvedPair, spec: RunSpec) -> Iterator[ConfigError]:
    yield from _target_refused(pair, spec)
    for own in pair.arms.values() or (pair,):
        yield from _drafting_refused(own, spec)


def _drafting_refused(pair: ResolvedPair, spec: RunSpec) -> Iterator[ConfigError]:
    """What cannot be said of the pair's way to draft, or does not run here."""
    yield from _counts_refused(pair, pair.method, spec)
    if is_cpu_build():
        remedy = NOT_ON_CPU.get(Method(pair.method), "")
        if remedy:
            yield ConfigError.for_field("--method", pair.method, remedy)
        remedy = "vLLM has no synthetic acceptance on a CPU; leave it out, or run on a GPU"
        yield from _synthetic_refused(pair, spec, remedy)


def _target_refused(pair: ResolvedPair, spec: RunSpec) -> Iterator[ConfigError]:
    """Heads that the ranks cannot share, and longer requests than the target's, as vLLM."""
    config = text_entries(read_model_config(pair.target) or {})
    heads, ranks = config.get("num_attention_heads"), spec.tensor_parallel_size
    if isinstance(heads, int) and heads % ranks:
        remedy = f"write a divisor of the target's {heads} attention heads"
        yield ConfigError.for_field("--tensor-parallel-size", ranks, remedy)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "default"}
    scaled = not isinstance(rope, dict) or rope.get("rope_type") != "default"
    if scaled or "model_max_length" in config or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        return  # vLLM decides
    longest, asked = config.get("max_position_embeddings"), spec.scenario.max_model_len
    if isinstance(longest, int) and asked > longest:
        remedy = f"the target's max_position_embeddings is {longest}; write at most that"
        yield ConfigError.for_field("--max-model-len", asked, remedy)


def _counts_refused(
    pair: ModelPair | ResolvedPair, method: str, spec: RunSpec
) -> Iterator[ConfigError]:
    """Draft counts in one engine if the method has one count, in any if the device decides it, and
    synthetic acceptance that nobody named."""
    if not spec.experiment.compares_drafts:
        return
    in_one = bool(spec.experiment.counts)
    if not changes_count(method) and in_one:
        yield ConfigError.for_field("--method", str(method), f"{WHICH_CHANGE}; write --engines")
    if method in WITHOUT_DRAFTER and spec.adaptive_verification:
        remedy = (
            f"vLLM verifies adaptively by a drafter's logits, and {method} has none; leave it out"
        )
        yield ConfigError.for_field("--adaptive-verification", True, remedy)
    graphs = spec.engine_args.get("compilation_config")
    mode = graphs.get("cudagraph_mode") if isinstance(graphs, dict) else None
    if mode == UNSAFE_GRAPHS and in_one:
        field = "--engine-args: compilation_config: cudagraph_mode"
        yield ConfigError.for_field(field, mode, WHY_UNSAFE)
    given = {**pair.speculative, **(spec.speculative_config or {})}
    if given.get(ADAPTIVE_VERIFICATION):
        field = f"--speculative-config: {ADAPTIVE_VERIFICATION}"
        remedy = f"{WHY_NOT_ADAPTIVE}. An engine of its own: --adaptive-verification"
        yield ConfigError.for_field(field, True, remedy)
    if spec.checks_only and (why := WHY_LOSSY.get(str(given.get(_METHOD)))):
        raise NotComparableError.at("NOT CHECKED", f"{why} ({_METHOD})", given[_METHOD])
    if given.get(_METHOD) == "synthetic" and ACCEPTANCE_RATES not in given:
        example = ",".join(f"{0.75 ** (j + 1):.2f}" for j in range(spec.scenario.draft_tokens))
        remedy = (
            "its acceptance is synthetic: name the share of windows that accept each draft, for "
            f"example --acceptance-rates {example}"
        )
        yield ConfigError.for_field("--pair", pair.name, remedy)


_METHOD = "rejection_sample_method"


def _synthetic_refused(pair: ResolvedPair, spec: RunSpec, remedy: str) -> Iterator[ConfigError]:
    given = spec.speculative_config or {}
    named = ((ACCEPTANCE_LENGTH, "--acceptance-length"), (ACCEPTANCE_RATES, "--acceptance-rates"))
    for key, flag in named:
        if key in given:
            yield ConfigError.for_field(flag, given[key], remedy)
    if {**pair.speculative, **given}.get(_METHOD) == "synthetic":
        yield ConfigError.for_field("--pair", pair.name, remedy)


_TOKENIZERS = ("*token*", "*vocab*", "*tekken*", "*.model", "*.spm", "*.bpe", "*.py")
"""Files that a tokenizer may be read from."""


def check_run(spec: RunSpec, choice: PairChoice) -> None:
    """Refuse a run that cannot start, as far as its models are on this machine.

    Raises ConfigError.
    """
    check_flags(spec)
    choice = choice.with_config(spec.speculative_config)
    for name, arm in spec.drafting_arms.items():
        check_drafter(name, arm, choice)
    if choice.target_model is None:
        own = load_pair(choice.pair or DEFAULT_PAIR)
        for refusal in () if spec.arms else _counts_refused(own, choice.method or own.method, spec):
            raise refusal
        if not pair_folder(own).is_dir():  # it is built or fetched later
            return
    pair = with_arms(resolve_pair(**asdict(choice)), choice, spec.drafting_arms)
    check_pair(pair, spec)
    _check_tokenizer(pair.target)
    sized, _ = with_own_dtype(pair, spec)
    for group in groups_with_room(sized, spec):
        require_memory(sized, group)
    for each in (pair, *pair.arms.values()):
        check_hub_models(each)


def check_sweep(sweep: SweepFile) -> None:
    """Refuse a sweep file with a run that cannot start. Raises ConfigError that names the run,
    see `ConfigError.of_run`."""
    for point in make_points(sweep):
        try:
            check_run(point.spec, point.choice)
        except ConfigError as error:
            raise error.of_run(point.number, point.label) from None


def why_engines(sweep: SweepFile, method: str | None = None) -> str | None:
    """Why each draft count of these runs needs an engine of its own, with the method; None if one
    engine changes its count, as far as the models are on this machine. `method`: that of an arm,
    whose counts alternate in whole batches: vLLM's V1 runner changes prompt lookup's too."""
    point, pair = make_points(sweep)[0], None
    choice, drafts = point.choice, point.spec.scenario.draft_tokens
    if choice.method is not None:
        check_method("--method", choice.method)
    own = None if choice.target_model else load_pair(choice.pair or DEFAULT_PAIR)
    if own is None or pair_folder(own).is_dir():
        pair = resolve_pair(**asdict(choice))
    if method == Method.NGRAM and not uses_gpu():
        return None
    method = method or str(pair.method if pair else choice.method or (own and own.method))
    if not changes_count(method):
        return f"vLLM cannot change the draft count of {method} step by step"
    if not uses_gpu() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return None
    config = (read_model_config(pair.target) if pair else None) or {}
    modules = mtp_layers(text_entries(config)) or 1 if method == Method.MTP else 1
    if method == Method.DRAFT_MODEL or min(modules, drafts) > 1:
        several = " with several modules" if method == Method.MTP else ""
        return f"on a GPU vLLM drafts the same number at every k with {method}{several}"
    return None


def with_own_dtype(pair: ResolvedPair, spec: RunSpec) -> tuple[ResolvedPair, str | None]:
    """The pair in the dtype that it runs in here, and why if that is not its own."""
    note = float32_reason(pair.dtype) if spec.dtype is None else None
    return (pair, None) if note is None else (replace(pair, dtype="float32"), note)


def require_incomplete(header: RunHeader, folder: str) -> None:
    """Raises ConfigError for a run that is complete."""
    if header.status is RunStatus.COMPLETE:
        remedy = "this run is complete; `nwor-bench report` shows it"
        raise ConfigError.for_field("--resume", folder, remedy)


def _check_tokenizer(target: str) -> None:
    """Refuse a model folder that no tokenizer can be read from."""
    folder = Path(target)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        remedy = "it has no tokenizer; name a folder with tokenizer files"
        raise ConfigError.for_field("--model", target, remedy)
