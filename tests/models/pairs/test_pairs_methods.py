"""Every method that the plugin stages is taken; what it needs beside the target is checked."""

from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from test_pairs_resolve import model_folder

from nwor_bench.models.methods import FROM_TARGET, WITHOUT_DRAFTER, Method
from nwor_bench.models.pairs import resolve_pair

MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "vocab_size": 1000}


@pytest.mark.parametrize("method", Method)
def test_every_staged_method_is_taken(tmp_path: Path, method: Method) -> None:
    target = model_folder(tmp_path / "target", **MIMO, num_nextn_predict_layers=1)
    draft = None
    if method not in WITHOUT_DRAFTER | FROM_TARGET:
        draft = model_folder(tmp_path / "draft", vocab_size=1000)
    pair = resolve_pair(target_model=target, draft_model=draft, method=method)
    config = pair.speculative_config(2)
    assert (config["method"], config.get("model")) == (method, draft)


@pytest.mark.parametrize("method", sorted(WITHOUT_DRAFTER))
def test_a_drafter_for_a_method_that_takes_none_is_refused(tmp_path: Path, method: str) -> None:
    target = model_folder(tmp_path / "target", vocab_size=1000)
    draft = model_folder(tmp_path / "draft", vocab_size=1000)
    with refused("draft_model", value=draft, naming=f"method {method}"):
        resolve_pair(target_model=target, draft_model=draft, method=method)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, "no MTP for model type llama"),
        ({**MIMO, "num_nextn_predict_layers": 0}, "it has no MTP layers"),
        ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 0}}, "no MTP layers"),
    ],
)
def test_mtp_without_mtp_layers_is_refused(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    target = model_folder(tmp_path / "target", **config)
    with refused("method", value="mtp", naming=reason):
        resolve_pair(target_model=target, method="mtp")


def test_mtp_of_a_hub_model_is_left_for_vllm() -> None:
    assert resolve_pair(target_model="org/model", method="mtp").draft is None


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("Qwen3DSparkModel", "dspark"), ("DFlashDraftModel", "dflash"), ("Gemma4MTPModel", "mtp")],
)
def test_the_drafters_config_names_the_method(
    tmp_path: Path, architecture: str, method: str
) -> None:
    target = model_folder(tmp_path / "target", vocab_size=1000)
    draft = model_folder(tmp_path / "draft", vocab_size=1000, architectures=[architecture])
    assert resolve_pair(target_model=target, draft_model=draft).method == method


def test_the_generated_mtp_pair_has_no_drafter(tmp_path: Path) -> None:
    pair = resolve_pair("tiny-mtp", cache_dir=tmp_path)
    assert (pair.method, pair.draft) == ("mtp", None)
    lookup = resolve_pair("tiny-mtp", method="ngram", cache_dir=tmp_path)
    assert (lookup.target, lookup.draft) == (pair.target, None)
    with refused("method", value="draft_model", naming="--draft-model"):
        resolve_pair("tiny-mtp", method="draft_model", cache_dir=tmp_path)
