"""Check that target, drafter and method fit together, from names and config.json alone."""

from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs.local import read_model_config
from nwor_bench.models.pairs.pair import METHODS

PROMPT_LOOKUP: dict[str, Any] = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""Default ngram settings: match the last 3 tokens, else 2, else 1."""


def choose_method(method: str | None, draft: str | None) -> str:
    """The given method; else the one of the drafter's config.json; else ngram without a drafter.

    Raises ConfigError for an unknown method, and if method and drafter contradict each other.
    """
    if method is None:
        return _method_of(draft)
    if method not in METHODS:
        raise ConfigError.unknown("method", method, METHODS)
    if method == "ngram" and draft is not None:
        raise ConfigError.for_field(
            "draft_model", draft, "method ngram drafts from the prompt and takes no drafter: "
            "leave --draft-model out, or write --method draft_model, eagle or eagle3",
        )  # fmt: skip
    if method != "ngram" and draft is None:
        raise ConfigError.for_field(
            "method", method, "it needs a drafter: add --draft-model FOLDER_OR_HUB_NAME, "
            "or write --method ngram",
        )  # fmt: skip
    return method


def _method_of(draft: str | None) -> str:
    if draft is None:
        return "ngram"
    config = read_model_config(draft, "draft_model") or {}
    kinds = f"{config.get('architectures')} {config.get('model_type')}".lower()
    if "eagle3" in kinds:
        return "eagle3"
    return "eagle" if "eagle" in kinds else "draft_model"


def check_vocabulary(method: str, target: str, draft: str | None) -> None:
    """Refuse a drafter with another vocabulary than the target. Raises ConfigError.

    A draft model needs the target's vocabulary size; an EAGLE head may draft from a part of it.
    Hub models, and configs without a size, are left for vLLM to check.
    """
    if draft is None:
        return
    target_size = vocabulary_size(read_model_config(target, "target_model"))
    draft_config = read_model_config(draft, "draft_model")
    draft_size = vocabulary_size(draft_config)
    if method in ("eagle", "eagle3") and draft_config is not None:
        draft_size = draft_config.get("draft_vocab_size") or draft_size
    if target_size is None or draft_size is None:
        return
    fits = draft_size == target_size if method == "draft_model" else draft_size <= target_size
    if not fits:
        raise ConfigError.for_field(
            "draft_model", draft, f"its vocabulary has {draft_size} tokens and the target's "
            f"{target_size}; name a drafter made for {target}",
        )  # fmt: skip


def vocabulary_size(config: dict[str, Any] | None) -> int | None:
    """vocab_size of a config.json or of its text_config; None if absent."""
    if config is None:
        return None
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else 0)
    return size if isinstance(size, int) and size > 0 else None
