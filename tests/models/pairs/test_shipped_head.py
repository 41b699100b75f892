"""The EAGLE head that ships, and heads that `speculators` wrote."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from nwor_bench.models.pairs import DEFAULT_PAIR, load_pair, pair_folder, resolve_pair
from nwor_bench.models.pairs.cache import COMPRESSED, WEIGHTS, unpacked
from nwor_bench.workload.config import load_scenario

PAIR = load_pair(DEFAULT_PAIR)
assert PAIR.packaged is not None
assert PAIR.packaged.drafter is not None
FOLDER = Path(PAIR.packaged.drafter)


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return content


def test_it_drafts_in_the_default_pair_and_prompt_lookup_in_the_other() -> None:
    lookup = load_pair("smollm2-ngram")
    assert (PAIR.method, lookup.method) == ("eagle", "ngram")
    assert lookup.packaged == PAIR.packaged.model_copy(update={"drafter": None})
    assert pair_folder(lookup) == pair_folder(PAIR)  # one build of the target serves both
    assert lookup.dtype == PAIR.dtype


def test_it_accepts_enough_and_its_card_says_so() -> None:
    """At least 2.0 tokens a window of held-out prompts, over as many tokens as `short` has."""
    record = read("training.json")
    held_out = {found["answer_tokens"]: found for found in record["epochs"][-1]["held_out"]}
    found = held_out[load_scenario("short").max_new_tokens]
    length = 1 + sum(found["accepted"]) / found["windows"]
    assert length >= 2.0
    card = (FOLDER / "README.md").read_text()
    for fact in (f"{length:.3f}", f"{record['parameters']:,}", record["weights_sha256"]):
        assert fact in card


def head_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Weights of vLLM's EagleLlamaForCausalLM with one layer; no input norm, as in EAGLE."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    shapes = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    return {"fc.weight": (hidden, 2 * hidden), **shapes}


@pytest.mark.slow
def test_its_weights_are_those_of_its_record_and_config(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    record = read("training.json")
    folder = Path(unpacked(str(FOLDER), tmp_path, lambda step: None))
    assert hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest() == record["weights_sha256"]
    assert folder.name == FOLDER.name  # what `compare` compares of a drafter's path
    assert {p.name for p in folder.iterdir()} ^ {p.name for p in FOLDER.iterdir()} == {
        WEIGHTS, COMPRESSED,
    }  # fmt: skip
    with safe_open(folder / WEIGHTS, "pt") as stored:
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert shapes == head_shapes(read("config.json"))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == record["parameters"]
    assert all(weight.isfinite().all() and weight.any() for weight in weights.values())


def test_a_head_that_speculators_wrote_drafts_by_its_own_method(tmp_path: Path) -> None:
    """Sizes are in `transformer_layer_config`; the vocabulary may be a part of the target's."""
    target, head = tmp_path / "target", tmp_path / "head"
    for folder, config in (
        (target, {"model_type": "llama", "vocab_size": 264}),
        (head, {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "draft_vocab_size": 200, "transformer_layer_config": {"vocab_size": 264},
        }),
    ):  # fmt: skip
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    pair = resolve_pair(target_model=str(target), draft_model=str(head))
    assert (pair.method, pair.draft) == ("eagle3", str(head))
