"""Rebuild the tokenizer that a GGUF file describes (byte-level BPE, as of GPT-2 and SmolLM2)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nwor_bench.errors import BenchError
from nwor_bench.models.pairs.json_file import write_json

_CONTROL = 3
"""token_type of a control token: matched as a whole, and left out of decoded text."""


def write_tokenizer(field: Callable[..., Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`.

    Raises BenchError when the tokenizer is of another kind.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    if (kind := field("tokenizer.ggml.model")) != "gpt2":
        raise BenchError(f"tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) works")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(field("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    types = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in types if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _settings(field, tokens))


def _pre_tokenizer(name: str) -> Any:
    """How text is cut before merging. `smollm`: each digit alone, then GPT-2's pattern."""
    from tokenizers import pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return gpt2
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2])
    raise BenchError(f"tokenizer.ggml.pre is {name!r}; only 'smollm' and 'gpt-2' work")


def _settings(field: Callable[..., Any], tokens: list[str]) -> dict[str, Any]:
    eos = field("tokenizer.ggml.eos_token_id")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[eos],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id", eos)],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id", eos)],
        "model_max_length": field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    template = field("tokenizer.chat_template", None)
    return settings if template is None else {**settings, "chat_template": template}
