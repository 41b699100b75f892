"""What each layer keeps, where a model's family decides it and its config lists nothing. Pure."""

from collections.abc import Mapping
from typing import Any

from nwor_bench.models.layer_kinds import Kind, every_nth, listed_kinds
from nwor_bench.models.recurrent.read import FULL_EVERY
from nwor_bench.models.sliding import slides

Config = Mapping[str, Any]

_ALL_RECURRENT = ("mamba", "mamba2", "falcon_mamba")
_BOTH = ("falcon_h1",)


def kinds_of(text: Config) -> tuple[Kind, ...]:
    """The kind of every layer. Raises ValueError or KeyError for what it cannot tell."""
    listed = listed_kinds(text)
    if listed is not None:
        return listed
    count = text["num_hidden_layers"]
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= 10_000:
        raise ValueError(f"num_hidden_layers is {count!r}")
    family = str(text.get("model_type", ""))
    blocks = text.get("block_configs")  # Nemotron-NAS
    if isinstance(blocks, list) and len(blocks) == count:
        return tuple(Kind.FULL if _attends(block) else Kind.NOTHING for block in blocks)
    if family in _ALL_RECURRENT:
        return (Kind.RECURRENT,) * count
    if family in _BOTH:
        return (Kind.BOTH,) * count
    if text.get("linear_num_key_heads"):
        return every_nth(count, int(text.get("full_attention_interval") or FULL_EVERY))
    if text.get("attn_layer_period"):  # Jamba
        period, offset = int(text["attn_layer_period"]), int(text.get("attn_layer_offset") or 0)
        return tuple(Kind.RECURRENT if n % period != offset else Kind.FULL for n in range(count))
    if text.get("attn_layer_indices"):  # Bamba
        full = set(text["attn_layer_indices"])
        return tuple(Kind.FULL if n in full else Kind.RECURRENT for n in range(count))
    if text.get("hybrid_layer_pattern"):  # MiMo V2
        return tuple(Kind.SLIDING if mark else Kind.FULL for mark in text["hybrid_layer_pattern"])
    if text.get("attention_chunk_size") and family.startswith("llama4"):
        return _chunked(text, count)
    return tuple(Kind.SLIDING if slides(text, n) else Kind.FULL for n in range(count))


def _chunked(text: Config, count: int) -> tuple[Kind, ...]:
    """Llama 4: layers with positions see one chunk, every fourth sees all of a request."""
    marks = text.get("no_rope_layers")
    if not marks:
        step = int(text.get("no_rope_layer_interval") or 4)
        marks = [int((n + 1) % step != 0) for n in range(count)]
    return tuple(Kind.CHUNKED if mark else Kind.FULL for mark in marks)


def _attends(block: Any) -> bool:
    own = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(own, Mapping):
        raise ValueError(f"block_configs has {block!r}")
    return not own.get("no_op") and not own.get("replace_with_linear")
