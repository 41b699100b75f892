"""Pairs without weights (source "shape"): config.json files for vLLM's dummy loader."""

from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs.local import write_json
from nwor_bench.models.pairs.pair import ShapeSource
from nwor_bench.models.pairs.tiny import BYTE_VOCABULARY, SPECIAL_TOKENS, write_byte_tokenizer

LOAD_FORMAT = "dummy"
"""vLLM's load format that fills any shape with small random numbers."""

WITHOUT_WEIGHTS = (
    "none (random, vLLM's dummy loader); acceptance and text of this pair mean nothing"
)


def check_shape(shape: ShapeSource) -> None:
    """Refuse a config.json that is not a decoder's, before anything is written.

    Raises ConfigError naming the table and the entry: a missing size, an architecture that the
    byte model does not cover, or a vocabulary too small for the prompts' tokens.
    """
    for name, config in _configs(shape):
        field = f"[shape.{name}]"
        for key, example in (("architectures", ["LlamaForCausalLM"]), ("model_type", "llama")):
            if not config.get(key):
                raise ConfigError.for_field(field, key, f"write it, for example {example!r}")
        sizes = read_shape(config, field, config["model_type"])
        if sizes.vocab < BYTE_VOCABULARY:
            raise ConfigError.for_field(
                f"{field} vocab_size", sizes.vocab,
                f"prompts are tokens of single bytes; write {BYTE_VOCABULARY} or more",
            )  # fmt: skip


def shape_parameters(config: dict[str, Any], field: str) -> int:
    """Parameters of the model that a config.json describes, without norms and biases."""
    return read_shape(config, field, str(config.get("model_type"))).parameters()


def write_shape(folder: Path, shape: ShapeSource) -> None:
    """Write `folder`/target and, with a drafter, `folder`/draft.

    The target gets a byte tokenizer, whose ids are valid in any larger vocabulary.
    """
    for name, config in _configs(shape):
        (folder / name).mkdir(parents=True)
        write_json(folder / name / "config.json", config)
    target = folder / "target"
    write_byte_tokenizer(target)
    ends = BYTE_VOCABULARY - len(SPECIAL_TOKENS)
    write_json(target / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends + 1})


def _configs(shape: ShapeSource) -> list[tuple[str, dict[str, Any]]]:
    configs = (("target", shape.target), ("draft", shape.draft))
    return [(name, config) for name, config in configs if config is not None]
