"""Memory that a run needs, compared with free memory before an engine starts."""

from dataclasses import replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.device import FreeMemory, free_memory, uses_gpu
from nwor_bench.models.config_json import most_cached_elements
from nwor_bench.models.config_reader import (
    AUTO,
    MODEL_BITS,
    ConfigReader,
    Kind,
    chosen_cache_dtype,
    text_entries,
)
from nwor_bench.models.methods import Method, mtp_layers
from nwor_bench.models.pairs import ResolvedPair, read_model_config
from nwor_bench.models.pairs.tiny import LOAD_FORMAT, shape_parameters
from nwor_bench.models.recurrent import RecurrentLayers, recurrent_kinds, recurrent_layers
from nwor_bench.records.cell import AA, Arm, engine_name
from nwor_bench.records.state_slots import ADDITIONAL, one_slot
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.experiment import AT_ONCE

GIB = 1 << 30
HEADROOM = 1.25
"""Room beside the requests' own tokens: block rounding and drafts in flight."""

UNKNOWN_MODEL_CACHE = 1 * GIB
"""Cache for a hub model whose config.json is not local yet."""

RUNTIME_BYTES = {"host": int(1.5 * GIB), "gpu": 3 * GIB}
"""Allowance for what vLLM, torch and activations take beside weights and cache; on a GPU for the
captured graphs of both modes too."""

CACHE_SIZE = "kv_cache_memory_bytes"
"""vLLM's argument for the size of the KV cache (kv_cache_gib in sweep files)."""

WIDEST = 4
"""Bytes of an element whose type is not known: float32's."""

_CACHE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of a cache element by vLLM's kv_cache_dtype; every other type is quantised to one."""

_QUANTISED_BYTES = {"fp8": 1, "mxfp8": 1, "int8": 1, "nvfp4": 0.5, "mxfp4": 0.5}
"""Bytes of a weight by the beginning of vLLM's `quantization`."""


def kv_cache_bytes(pair: ResolvedPair, spec: RunSpec) -> int:
    """Bytes of KV cache: `kv_cache_memory_bytes`, or enough for all requests at full length.

    One block comes on top, since vLLM keeps the first one empty, and a hybrid's recurrent states.
    """
    if CACHE_SIZE in spec.engine_args:
        return int(spec.engine_args[CACHE_SIZE])
    pair = _loaded(pair, spec)
    per_token = cache_bytes_per_token(pair, spec)
    if per_token is None:
        return UNKNOWN_MODEL_CACHE
    block = _cache_block(pair, spec)
    length = -(-spec.scenario.max_model_len // block) * block
    per_request = (per_token * length + _state_bytes(pair, spec)) * HEADROOM
    return int(per_request * spec.scenario.requests) + per_token * block


def _loaded(pair: ResolvedPair, spec: RunSpec) -> ResolvedPair:
    """What the engine loads of the pair: without drafts only the target."""
    return pair if spec.scenario.draft_tokens else replace(pair, draft=None, method=Method.NGRAM)


def _hybrid(pair: ResolvedPair) -> tuple[dict[str, Any], RecurrentLayers | None]:
    """The target's config and recurrent layers; vLLM's CPU build may keep states in float32."""
    config = read_model_config(pair.target) or {}
    wide = {"mamba_ssm_dtype": "float32"} if not uses_gpu() else {}
    return config, recurrent_layers({**text_entries(config), **wide})


def _cache_block(pair: ResolvedPair, spec: RunSpec) -> int:
    """Tokens of a cache block; a hybrid's is as large as the slot of a state."""
    config, layers = _hybrid(pair)
    if layers is None:
        return int(spec.engine_args.get("block_size") or 128)
    row = most_cached_elements(_reader(config)) * cache_element_bytes(pair, spec)
    page = layers.page_bytes(spec.scenario.draft_tokens, spec.tensor_parallel_size)
    return 128 * ceil(page / (128 * row))


def _state_bytes(pair: ResolvedPair, spec: RunSpec) -> int:
    """Recurrent states that vLLM reserves a request, one for each of a window's tokens or
    one alone; 0 for a model without, or if its config does not give their sizes.

    vLLM fills up groups of recurrent layers to the number of the layers with K/V.
    """
    config, layers = _hybrid(pair)
    if layers is None:
        return 0
    attending = max(1, _attending_layers(_reader(config)) + _own_layers(pair))
    padded = replace(layers, count=attending * ceil(layers.count / attending))
    slots = 1 if one_slot(spec.engine_args.get(ADDITIONAL)) else None
    return int(padded.slot_bytes(spec.scenario.draft_tokens, spec.tensor_parallel_size, slots))


def cache_bytes_per_token(pair: ResolvedPair, spec: RunSpec) -> int | None:
    """K and V of one token over all layers of target and drafter; None for a hub model,
    and for a config.json with other names for its sizes.

    layers x elements of the layer that has most x bytes an element; an indexer's fp8 keys and
    their scales take less.
    """
    total = 0
    for model in (pair.target, pair.draft):
        if model is None:
            continue
        elements = _cache_elements(read_model_config(model) or {}, _own_layers(pair))
        if elements == 0:
            return None
        total += elements * cache_element_bytes(pair, spec)
    return total


def cache_element_bytes(pair: ResolvedPair, spec: RunSpec) -> int:
    """Bytes of one K or V element: as --engine-args kv_cache_dtype says, as the target's checkpoint
    asks, or of the run's dtype."""
    asked = str(spec.engine_args.get("kv_cache_dtype", AUTO))
    kind = chosen_cache_dtype(read_model_config(pair.target) or {}, asked)
    return _element_bytes(pair, spec) if kind == AUTO else _CACHE_BYTES.get(kind, 1)


def _element_bytes(pair: ResolvedPair, spec: RunSpec) -> int:
    """Bytes of an activation or weight: by the run's dtype, or the config's if it is auto."""
    dtype = spec.dtype or pair.dtype
    if dtype == "auto":
        return _bytes_of_config(read_model_config(pair.target) or {})
    return MODEL_BITS[dtype] // 8


def _bytes_of_config(config: dict[str, Any]) -> int:
    try:
        return MODEL_BITS[ConfigReader(config).dtype()] // 8
    except ConfigError:
        return WIDEST


def _own_layers(pair: ResolvedPair) -> int:
    """The target's MTP layers if it drafts with them: vLLM gives each a cache."""
    if pair.draft is not None or pair.method != Method.MTP:
        return 0
    return mtp_layers(text_entries(read_model_config(pair.target) or {})) or 1


def _cache_elements(config: dict[str, Any], drafting: int = 0) -> int:
    """0 if the config does not say: vLLM knows more models, and fills in missing entries."""
    reader = _reader(config)
    try:
        return (_attending_layers(reader) + drafting) * most_cached_elements(reader)
    except ConfigError:
        return 0


def _reader(config: dict[str, Any]) -> ConfigReader:
    """Without a number of heads it is all of the hidden size: too much rather than too little."""
    return ConfigReader({"num_attention_heads": 1, **text_entries(config)})


def _attending_layers(reader: ConfigReader) -> int:
    """Layers with K/V: all but a hybrid's recurrent and other ones."""
    kinds = recurrent_kinds(reader)
    if kinds is None:
        return reader.number("num_hidden_layers")
    return sum(kind not in (Kind.RECURRENT, Kind.NOTHING) for kind in kinds)


def needed_bytes(pair: ResolvedPair, spec: RunSpec, where: str) -> int:
    """Bytes that each rank needs on the "gpu" or the "host": cache, weights, runtime.

    Excludes a hub model's weights, whose size is unknown.
    """
    weights = _weight_bytes(_loaded(pair, spec), spec, on_gpu=where == "gpu")
    share = weights // spec.tensor_parallel_size
    return kv_cache_bytes(pair, spec) + share + RUNTIME_BYTES[where]


def require_memory(pair: ResolvedPair, spec: RunSpec) -> None:
    """Raises ConfigError if cache and weights will not fit into the device's free memory."""
    free = free_memory(spec.tensor_parallel_size)
    needed = needed_bytes(pair, spec, free.where)
    if spec.experiment.asked_by is not None:
        _require_memory_of_all(pair, spec, free, spec.experiment.asked_by)
    elif needed > free.num_bytes:
        if CACHE_SIZE in spec.engine_args:
            field, value = CACHE_SIZE, str(spec.engine_args[CACHE_SIZE])
        else:
            field = "--requests x --max-model-len"
            value = f"{spec.scenario.requests} x {spec.scenario.max_model_len}"
        place = " on the GPU" if free.where == "gpu" else ""
        raise ConfigError.for_field(
            field,
            value,
            f"no free memory for the cache: {needed / GIB:.1f} GiB needed with the weights, "
            f"{free.num_bytes / GIB:.1f} GiB free{place}; write a smaller {CACHE_SIZE}, fewer "
            "--requests or a shorter --max-model-len",
        )


def _require_memory_of_all(
    pair: ResolvedPair, spec: RunSpec, free: FreeMemory, asked_by: tuple[str, object]
) -> None:
    """The engines of all arms but A/A must fit."""
    needed = _needed_by_arm(pair, spec, free)
    if sum(needed.values()) <= free.num_bytes:
        return
    gib = ", ".join(f"{size / GIB:.1f}" for size in needed.values())
    remedy = (
        f"no free memory for {len(needed)} engines: {gib} GiB needed, {free.num_bytes / GIB:.1f} "
        f"GiB free; write fewer --requests, a shorter --max-model-len or a smaller {CACHE_SIZE}"
    )
    if spec.checks_only and spec.experiment.compares_drafts:
        asked_by = ("--requests", spec.scenario.requests)
    elif spec.experiment.compares_drafts:
        remedy += ", or leave it out" if spec.arms else ", or a smaller --max-draft-tokens"
    raise ConfigError.for_field(*asked_by, remedy)


def _needed_by_arm(pair: ResolvedPair, spec: RunSpec, free: FreeMemory) -> dict[Arm | None, int]:
    engines = [(arm, engine) for arm, engine in spec.engine_specs.items() if arm != AA]
    return {arm: needed_bytes(pair.of_arm(arm), own, free.where) for arm, own in engines}


def engines_with_room(pair: ResolvedPair, spec: RunSpec) -> dict[Arm | None, RunSpec]:
    """`RunSpec.engine_specs`, but that of A/A only if there is room for one more."""
    free, engines = free_memory(spec.tensor_parallel_size), spec.engine_specs
    needed = (needed_bytes(pair.of_arm(a), own, free.where) for a, own in engines.items())
    if sum(needed) > free.num_bytes:
        engines.pop(AA, None)
    return engines


def groups_with_room(pair: ResolvedPair, spec: RunSpec) -> list[RunSpec]:
    """The run, or if its engines do not fit at once one for each group of them that fits beside
    plain decoding's, in order. What does not fit even so is a group that `require_memory` refuses.
    """
    free = free_memory(spec.tensor_parallel_size)
    needed = _needed_by_arm(pair, spec, free)
    groups, room, plain = list[list[str]](), -1, needed.pop(None)
    for name, arms in groupby(needed, key=engine_name):
        size = sum(needed[arm] for arm in arms)
        if size > room:
            groups.append([])
            room = free.num_bytes - plain
        groups[-1].append(name)
        room -= size
    if len(groups) < 2 or spec.engines_at_once is not None:
        return [spec]
    return [replace(spec, engines_at_once=AT_ONCE.join(names)) for names in groups]


def _dummy_bytes(config: dict[str, Any], model: str, spec: RunSpec, element: int) -> int:
    """Bytes of made-up weights. vLLM may quantise them as it loads them (`quantization`), all but
    the embeddings."""
    parameters = shape_parameters(config, model)
    scheme = str(spec.engine_args.get("quantization") or "")
    size = next((size for name, size in _QUANTISED_BYTES.items() if scheme.startswith(name)), None)
    if size is None:
        return parameters * element
    reader = _reader(config)
    plain = reader.number("vocab_size") * reader.number("hidden_size")
    plain *= 1 if config.get("tie_word_embeddings") else 2
    return int((parameters - plain) * size) + plain * element


def _weight_bytes(pair: ResolvedPair, spec: RunSpec, on_gpu: bool) -> int:
    """Bytes of the loaded weights; 0 for a hub model, whose size is unknown.

    Dummy weights: the config's parameters. Files: their size, twice on a CPU
    as bf16 may be widened to float32 there, and on a GPU if the run's dtype is the wider one.
    """
    total = 0
    for model in (pair.target, pair.draft):
        config = None if model is None else read_model_config(model)
        if model is None or config is None:
            continue
        element = _element_bytes(pair, spec)
        if LOAD_FORMAT in (pair.load_format, spec.engine_args.get("load_format")):
            total += _dummy_bytes(config, model, spec, element)
            continue
        size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        wider = element > _bytes_of_config(config)
        total += size * (2 if not on_gpu or wider else 1)
    return total
