"""Options that do not fit together are refused before anything is fetched, with a way out."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from refusals import refused

from nwor_bench.models.methods import FROM_TARGET, WITHOUT_DRAFTER, Method
from nwor_bench.models.pairs import ResolvedPair, read_model_config, resolve_pair
from nwor_bench.models.pairs import fetch as fetch_module

MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "vocab_size": 1000}


def model_folder(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return model_folder(tmp_path / "target", vocab_size=1000)


@pytest.fixture
def no_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(fetch_module, "build_once", refuse)


def test_a_target_without_a_drafter_drafts_by_prompt_lookup(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = resolve_pair(target_model="./target")  # becomes absolute
    assert (pair.name, pair.method, pair.target, pair.draft) == ("target", "ngram", target, None)
    assert pair.dtype == "auto"
    assert pair.speculative_config(3) == {
        "method": "ngram", "num_speculative_tokens": 3,
        "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip


def test_draft_model_of_the_same_vocabulary(tmp_path: Path, target: str) -> None:
    draft = model_folder(tmp_path / "draft", vocab_size=1000)
    pair = resolve_pair(target_model=target, draft_model=draft)
    assert pair.speculative_config(5) == {
        "method": "draft_model", "model": draft, "num_speculative_tokens": 5
    }  # fmt: skip


def test_eagle_may_draft_from_part_of_the_vocabulary(tmp_path: Path, target: str) -> None:
    part = model_folder(tmp_path / "part", vocab_size=1000, draft_vocab_size=200)
    assert resolve_pair(target_model=target, draft_model=part, method="eagle").draft == part


@pytest.mark.parametrize(
    ("config", "method", "naming"),
    [
        (
            {"vocab_size": 1001},
            None,
            "has 1001 tokens and the target's 1000; name a drafter",
        ),
        ({"vocab_size": 999}, None, "999 tokens"),
        ({"vocab_size": 1000, "draft_vocab_size": 1001}, "eagle", "1001 tokens"),
        ({"vocab_size": 1000, "draft_vocab_size": 1001}, "eagle3", "1001 tokens"),
        ({"text_config": {"vocab_size": 999}}, None, "999 tokens"),
        *(({"vocab_size": 1000}, method, f"method {method}") for method in sorted(WITHOUT_DRAFTER)),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    tmp_path: Path, target: str, config: dict[str, Any], method: str | None, naming: str
) -> None:
    draft = model_folder(tmp_path / "draft", **config)
    with refused("--draft-model", value=draft, naming=naming):
        resolve_pair(target_model=target, draft_model=draft, method=method)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("LlamaForCausalLM", "draft_model"), ("EagleLlamaForCausalLM", "eagle"),
     ("LlamaForCausalLMEagle3", "eagle3"), ("Qwen3DSparkModel", "dspark"),
     ("DFlashDraftModel", "dflash"), ("Gemma4MTPModel", "mtp")],
)  # fmt: skip
def test_method_follows_from_the_drafter(
    tmp_path: Path, target: str, architecture: str, method: str
) -> None:
    draft = model_folder(tmp_path / "draft", vocab_size=1000, architectures=[architecture])
    assert resolve_pair(target_model=target, draft_model=draft).method == method


@pytest.mark.parametrize(
    ("options", "field", "wanted"),
    [
        *(({**pair, "method": method}, "--method", {"near": "", "naming": "--draft-model"})
          for method in ("draft_model", "eagle", "eagle3")
          for pair in ({"target_model": "TARGET"}, {"pair": "smollm2-ngram"})),
        *(({"pair": "smollm2", "method": method}, "--method", {"naming": "drafter is for eagle"})
          for method in ("draft_model", "eagle3")),
        *(({**pair, "method": "eagle-3"}, "--method", {"near": "eagle3"})
          for pair in ({"target_model": "TARGET"}, {"pair": "tiny"}, {"pair": "smollm2"})),
        ({"pair": "smolm2"}, "--pair", {"near": "smollm2"}),
        ({"pair": "mine"}, "--pair", {"naming": "`nwor-bench list pairs` shows all"}),
        *(({"target_model": reference}, "--model", {"naming": "org/name"}) for reference in
          ("", " ", "llama", "/no/such/folder", "./gone", "a/b/c", "a/b c", "org/ñ", "~/x")),
    ],
    ids=str,
)  # fmt: skip
def test_what_names_no_pair_is_refused_before_anything_is_fetched(
    no_building: None, target: str, options: dict[str, str], field: str, wanted: dict[str, Any]
) -> None:
    options = {name: target if value == "TARGET" else value for name, value in options.items()}
    value = options.get("method" if field == "--method" else "target_model", options.get("pair"))
    with refused(field, value=value, **wanted):
        resolve_pair(**options)


@pytest.mark.parametrize("option", ["target_model", "draft_model"])
def test_folder_without_config_is_refused(
    no_building: None, tmp_path: Path, option: str, target: str
) -> None:
    options = {"target_model": target, option: str(tmp_path)}
    flag = {"target_model": "--model", "draft_model": "--draft-model"}[option]
    with refused(flag, value=str(tmp_path), cause=FileNotFoundError):
        resolve_pair(**options)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{", {"cause": ValueError, "naming": "config.json"}),
        ("[1]", {"cause": None, "naming": "is not a JSON object"}),
        ('{"model_type": "llama", "text_config": [1]}', {"naming": '"text_config"'}),
    ],
)
def test_a_config_that_is_not_a_json_object_is_refused(
    tmp_path: Path, content: str, wanted: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(content)
    with refused("--model", value=str(tmp_path), **wanted):
        resolve_pair(target_model=str(tmp_path))


def test_file_is_refused_in_favour_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    file = str(tmp_path / "model.gguf")
    with refused("--model", value=file, naming="it is a file"):
        resolve_pair(target_model=file)


def test_hub_names_are_left_for_vllm() -> None:
    pair = resolve_pair(
        target_model="meta-llama/Llama-3.2-3B", draft_model="org/head_1.0", method="eagle"
    )
    assert (pair.name, pair.target, pair.draft) == (
        "Llama-3.2-3B", "meta-llama/Llama-3.2-3B", "org/head_1.0",
    )  # fmt: skip
    assert read_model_config(pair.target) is None
    assert resolve_pair(target_model="org/model", method="mtp").draft is None


def test_a_method_changes_how_a_pair_drafts(tmp_path: Path) -> None:
    as_is = resolve_pair("tiny", cache_dir=tmp_path)
    assert as_is.method == "draft_model"
    assert as_is.draft is not None
    lookup = resolve_pair("tiny", method="ngram", cache_dir=tmp_path)
    assert lookup.draft is None
    assert lookup.speculative["prompt_lookup_max"] == 3
    back = resolve_pair("tiny-ngram", method="draft_model", cache_dir=tmp_path)
    assert back.draft == as_is.draft
    assert back.speculative == {}


def test_a_drafter_replaces_the_pairs_own(tmp_path: Path) -> None:
    draft = model_folder(tmp_path / "draft", vocab_size=264)
    pair = resolve_pair("tiny", draft_model=draft, cache_dir=tmp_path / "cache")
    assert (pair.name, pair.draft) == ("tiny", draft)
    wrong = model_folder(tmp_path / "wrong", vocab_size=512)
    with refused("--draft-model", value=wrong, naming="512 tokens"):
        resolve_pair("tiny", draft_model=wrong, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("count", [0, -1, True])
def test_draft_tokens_must_be_positive(count: int) -> None:
    pair = ResolvedPair("p", "ngram", "org/name", None, "auto")
    with refused("--draft-tokens", value=count):
        pair.speculative_config(count)


@pytest.mark.parametrize("method", Method)
def test_every_staged_method_is_taken(tmp_path: Path, method: Method) -> None:
    target = model_folder(tmp_path / "target", **MIMO, num_nextn_predict_layers=1)
    draft = None
    if method not in WITHOUT_DRAFTER | FROM_TARGET:
        draft = model_folder(tmp_path / "draft", vocab_size=1000)
    pair = resolve_pair(target_model=target, draft_model=draft, method=method)
    config = pair.speculative_config(2)
    assert (config["method"], config.get("model")) == (method, draft)


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
    with refused("--method", value="mtp", naming=reason):
        resolve_pair(target_model=target, method="mtp")


def test_the_generated_mtp_pair_has_no_drafter(tmp_path: Path) -> None:
    pair = resolve_pair("tiny-mtp", cache_dir=tmp_path)
    assert (pair.method, pair.draft) == ("mtp", None)
    lookup = resolve_pair("tiny-mtp", method="ngram", cache_dir=tmp_path)
    assert (lookup.target, lookup.draft) == (pair.target, None)
    with refused("--method", value="draft_model", naming="--draft-model"):
        resolve_pair("tiny-mtp", method="draft_model", cache_dir=tmp_path)
