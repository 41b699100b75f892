"""What the plugin would stage of a model, from its config.json: one config for each class."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from recipe_models import LEFT_OUT, recipe_table, recipes
from refusals import refused

from nwor_bench.models.config_reader import Kind
from nwor_bench.models.methods import NOT_ON_CPU, Method
from nwor_bench.models.pairs.local import find_config
from nwor_bench.models.support.facts import (
    OWN_ATTENTION,
    STATE_LAYERS,
    Device,
    EngineFacts,
    ModelFacts,
    Runner,
    read_facts,
)
from nwor_bench.models.support.predict import (
    Outcome,
    method_support,
    methods_of,
    predict_support,
)
from nwor_bench.models.support.rules import FOLLOWED_ON_CPU, FOLLOWED_ON_GPU, path_of
from nwor_bench.report.support import layer_rows

CHECKOUT = Path(__file__).parents[2]
FIELD = "CONFIG_OR_MODEL"

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 64,
}  # fmt: skip

SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V32 = {**MLA, "index_topk": 64, "architectures": ["DeepseekV32ForCausalLM"]}

CLASSES: tuple[tuple[str, dict[str, Any], str | None, str | None, str | None], ...] = (
    ("plain", {}, None, None, None),
    ("sliding alone", {"sliding_window": 32}, None, None, None),
    ("several groups", SLIDING, None, None, None),
    ("sinks", {**SLIDING, "model_type": "gpt_oss"}, None, None, None),
    ("sinks of sliding layers", {**SLIDING, "swa_attention_sink_enabled": True}, None, None,
     None),
    ("MLA", MLA, None, "unsupported_attention:FlashInferMLAImpl",
     "unsupported_attention:CPUMLAImpl"),
    ("small MLA", {**MLA, "kv_lora_rank": 256}, None, None, "unsupported_attention:CPUMLAImpl"),
    ("sparse MLA", {**MLA, "index_topk": 64}, "unsupported_attention:FlashAttnMLASparseImpl",
     "unsupported_attention:FlashMLASparseImpl", "sparse_indexer"),
    ("attention of its own", {"architectures": ["KimiLinearForCausalLM"]},
     "own_attention:kimi_k3", "own_attention:kimi_k3", None),
    ("recurrent", {"layer_types": ["linear_attention", "full_attention"] * 2},
     None, None, None),
    ("Mamba alone", {"model_type": "mamba2"}, "recurrent_layers", "recurrent_layers",
     "recurrent_layers"),
    ("both in a layer", {"model_type": "falcon_h1"}, None, None, None),
    ("a pattern", {"hybrid_override_pattern": "M-M*"}, None, None, None),
    ("shared K/V", {"num_kv_shared_layers": 2}, None, None, None),
    ("chunked", {"model_type": "llama4_text", "attention_chunk_size": 64}, None, None, None),
    ("ALiBi", {"model_type": "bloom"}, "alibi", "alibi", "alibi"),
    ("wide heads", {"head_dim": 520}, "head_dim_520", "head_dim_520", None),
    ("images", {"model_type": "gemma3"}, None, None, None),
    ("values of another size", {"v_head_dim": 32}, None, None,
     "unsupported_attention:TritonAttentionDiffKVImpl"),
    ("wide values", {"v_head_dim": 520}, "head_dim_520", "head_dim_520",
     "unsupported_attention:TritonAttentionDiffKVImpl"),
    ("layers that run twice", {"architectures": ["IQuestLoopCoderForCausalLM"]},
     *["attention:kv_cache_update_bypass"] * 3),
    ("prompts that see themselves", {"architectures": ["HrmTextForCausalLM"]},
     *["attention_metadata:EncoderOnlyAttentionBuilder"] * 3),
    ("a rolling window", {"rswa_window": 64}, "rswa_window", "rswa_window", None),
)  # fmt: skip


def facts(**changes: Any) -> ModelFacts:
    return read_facts({**PLAIN, **changes}, "m", "CONFIG_OR_MODEL", "m")


def reason(model: ModelFacts, device: Device = Device.HOPPER, **engine: Any) -> str | None:
    return predict_support(model, EngineFacts(device=device, **engine)).reason


@pytest.mark.parametrize(
    ("changes", "hopper", "blackwell", "cpu"), [row[1:] for row in CLASSES],
    ids=[row[0] for row in CLASSES],
)  # fmt: skip
def test_each_class_has_its_reason(
    changes: dict[str, Any], hopper: str | None, blackwell: str | None, cpu: str | None
) -> None:
    model = facts(**changes)
    found = [reason(model, device) for device in (Device.HOPPER, Device.BLACKWELL, Device.CPU)]
    assert found == [hopper, blackwell, cpu]


@pytest.mark.parametrize(
    ("changes", "engine", "expected"),
    [
        ({}, {"cache_dtype": "fp8"}, None),
        ({}, {"cache_dtype": "nvfp4"}, "cache_dtype:nvfp4"),
        ({"v_head_dim": 32}, {"cache_dtype": "fp8"}, None),
        ({"v_head_dim": 32}, {"cache_dtype": "fp8_e5m2"}, "cache_dtype:fp8_e5m2"),
        ({}, {"draft_tokens": 15}, None),
        ({}, {"draft_tokens": 16}, "window_of_17_tokens"),
        ({}, {"device": Device.CPU, "cache_dtype": "fp8"}, "cache_dtype:fp8"),
        (V32, {}, "own_attention:deepseek_v32"),
        (V32, {"device": Device.CPU}, "sparse_indexer"),
    ],
)  # fmt: skip
def test_what_the_engines_flags_change(
    changes: dict[str, Any], engine: dict[str, Any], expected: str | None
) -> None:
    assert reason(facts(**changes), **engine) == expected


def test_layers_are_told_by_themselves() -> None:
    """Recurrent layers stay as they are, whatever becomes of the others."""
    rows = layer_rows(predict_support(facts(**SLIDING), EngineFacts()))
    assert [(row[0], row[3]) for row in rows] == [("2", "could be staged")] * 2
    assert rows[0][1] == "sliding attention of 32, head size 64"
    blocks = predict_support(facts(hybrid_override_pattern="M-M*"), EngineFacts())
    assert [row[3] for row in layer_rows(blocks)] == [
        "recurrent_layers", "nothing to stage", "could be staged",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "part", "states"),
    [
        ("Qwen3-Next-80B-A3B", {}, "both", None),
        ("Qwen3.5-27B", {}, "both", None),
        ("Qwen3-Next-80B-A3B", {"model_type": "olmo_hybrid"}, "K/V",
         "unsupported_states:OlmoHybridGatedDeltaNetAttention"),
        ("Qwen3-Next-80B-A3B", {"head_dim": 520}, "none", None),
        ("Nemotron-H-56B", {}, "K/V", "unsupported_states:MambaMixer2"),
        ("Kimi-Linear-48B-A3B", {}, "none", "recurrent_layers"),
        ("Llama-3.2-3B", {}, "K/V", None),
    ],
)  # fmt: skip
def test_which_part_is_staged(
    name: str, changes: dict[str, Any], part: str, states: str | None
) -> None:
    config = json.loads((CHECKOUT / f"tests/data/configs/{name}.json").read_text())
    found = predict_support(read_facts({**config, **changes}, "m", FIELD, "m"), EngineFacts())
    assert found.part.value == part
    assert [group.reason for group in found.recurrent] == [states] * len(found.recurrent)
    assert (len(found.recurrent) == 0) == name.startswith("Llama")


def test_values_of_another_size_are_reported() -> None:
    model = facts(**SLIDING, v_head_dim=64, swa_num_key_value_heads=2, swa_v_head_dim=32)
    assert [layer.value_dim for layer in model.layers[:2]] == [32, None]
    rows = layer_rows(predict_support(model, EngineFacts()))
    assert [row[1:3] for row in rows] == [
        ("sliding attention of 32, head size 64, values of 32", "FLASH_ATTN_DIFFKV"),
        ("full attention, head size 64", "FLASH_ATTN"),
    ]


def test_expanded_latent_rows_are_plain_keys_and_values() -> None:
    """MiniCPM3: vLLM runs it without latent attention."""
    (group,) = predict_support(facts(**MLA, model_type="minicpm3"), EngineFacts()).groups
    assert (group.layer.latent, group.layer.head_dim, group.layer.value_dim) == (False, 192, None)
    assert group.backend == "FLASH_ATTN"


def test_a_published_bloom_has_its_slopes() -> None:
    """BLOOM's config.json counts its layers as n_layer."""
    config = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 3,
              "num_attention_heads": 4, "n_embed": 64}  # fmt: skip
    model = read_facts(config, "m", "CONFIG_OR_MODEL", "m")
    assert [(layer.alibi, layer.head_dim) for layer in model.layers] == [(True, 16)] * 3
    assert reason(model, Device.BLACKWELL) == "alibi"


def test_layers_that_a_search_left_without_attention() -> None:
    """Nemotron-NAS."""
    attentions = [{"n_heads_in_group": 8}, {"no_op": True}, {"replace_with_linear": True}, {}]
    model = facts(block_configs=[{"attention": each} for each in attentions])
    assert [layer.kind for layer in model.layers] == [
        Kind.FULL, Kind.NOTHING, Kind.NOTHING, Kind.FULL,
    ]  # fmt: skip


def test_granites_sliding_models_have_sinks_in_every_layer() -> None:
    changes = {"model_type": "granite_swa", "sliding_window": 32}
    layers = facts(**changes).layers
    assert [(layer.window, layer.sinks) for layer in layers] == [(None, True), *[(32, True)] * 3]
    assert not any(layer.sinks for layer in facts(**changes, attention_sinks=False).layers)


def test_sliding_latent_layers_have_their_own_row_and_no_indexer() -> None:
    """dots3: the full layers' indexers select, the sliding layers keep wider rows."""
    swa = {"swa_kv_lora_rank": 1024, "swa_qk_rope_head_dim": 64}
    sliding, full = facts(**SLIDING, **MLA, **swa, index_topk=64).layers[:2]
    assert (sliding.head_dim, sliding.window, sliding.sparse) == (1088, 32, False)
    assert (full.head_dim, full.window, full.sparse) == (576, None, True)


def test_qwens_sparse_attention_is_named_after_its_own_package() -> None:
    model = facts(architectures=["Qwen4ExpForCausalLM"], indexer_budget=64)
    (group,) = predict_support(model, EngineFacts()).groups
    assert group.reason == "unsupported_attention:Qwen4ExpQSAFlashAttentionImpl"
    assert reason(model, Device.CPU) == "sparse_indexer"


def test_methods_are_staged_or_refused_with_their_reason() -> None:
    found = {each.method: each for each in methods_of(facts(), EngineFacts())}
    assert set(found) == set(Method)
    assert {m for m, each in found.items() if each.outcome is Outcome.STAGED} == {
        Method.NGRAM, Method.NGRAM_GPU, Method.DRAFT_MODEL, Method.EAGLE, Method.EAGLE3,
        Method.DFLASH, Method.DSPARK,
    }  # fmt: skip
    assert found[Method.SUFFIX].runner is Runner.V1
    assert found[Method.SUFFIX].reason == "v1_runner_on_gpu"
    assert found[Method.MTP].reason == "vLLM has no MTP for model type llama"
    for method, reason in NOT_ON_CPU.items():  # as `sweep` refuses them
        on_cpu = method_support(facts(), EngineFacts(device=Device.CPU), method)
        assert (on_cpu.outcome, on_cpu.reason) == (Outcome.REFUSED, reason)
    assert {Method.DSPARK, Method.NGRAM_GPU} <= set(NOT_ON_CPU)
    none = facts(model_type="glm4_moe", num_nextn_predict_layers=0)
    assert method_support(none, EngineFacts(), Method.MTP).outcome is Outcome.REFUSED
    named = facts(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    assert method_support(named, EngineFacts(), Method.MTP).outcome is Outcome.STAGED
    some = facts(model_type="glm4_moe", num_nextn_predict_layers=1)
    assert method_support(some, EngineFacts(), Method.MTP).outcome is Outcome.STAGED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"layer_types": ["full_attention", "novel"]}, "novel"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_hidden_layers": True}, "True"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"block_configs": [{}] * 4}, "block_configs"),
        ({"block_configs": ["x"] * 4}, "block_configs"),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True,
             "max_window_layers": "x"},
            "max_window_layers",
        ),
        (
            {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern",
        ),
    ],
)  # fmt: skip
def test_a_config_that_does_not_say_its_layers_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    with refused("CONFIG_OR_MODEL", value="m", naming=words):
        facts(**changes)


def test_a_model_is_found_by_file_folder_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLAIN))
    assert find_config(FIELD, str(folder)).config == PLAIN
    assert find_config(FIELD, str(folder / "config.json")).name == "mine"
    with refused(FIELD, value="someone/model", naming="cache"):
        find_config(FIELD, "someone/model")
    cached = tmp_path / "hub/models--someone--model"
    for revision, layers in (("a", 1), ("b", 2)):
        (cached / "snapshots" / revision).mkdir(parents=True)
        written = json.dumps({**PLAIN, "num_hidden_layers": layers})
        (cached / "snapshots" / revision / "config.json").write_text(written)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("b")
    assert find_config(FIELD, "someone/model").config["num_hidden_layers"] == 2
    (folder / "config.json").write_text("[]")
    with refused(FIELD, value=str(folder / "config.json"), cause=None):
        find_config(FIELD, str(folder / "config.json"))


def test_fifty_recipe_models_and_more_have_facts_with_a_source() -> None:
    rows = recipes()
    assert len(rows) >= 50
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.source.startswith("https://") and row.draft_tokens > 0 for row in rows)
    assert {row.name for row in rows}.isdisjoint(LEFT_OUT)
    assert {row.kind for row in rows} >= {
        "plain", "recurrent", "MLA", "sparse MLA", "sparse", "recurrent, MLA", "sliding + full",
        "sinks, sliding + full", "shared K/V, sliding + full, 2 head sizes",
    }  # fmt: skip
    assert {row.found.outcome for row in rows} == {Outcome.STAGED, Outcome.DIRECT}


def test_the_page_has_the_recipe_table() -> None:
    page = (CHECKOUT / "docs/support.md").read_text(encoding="utf-8")
    table = page.partition("<!-- recipe table: ")[2].partition("-->")[2]
    assert table.partition("<!-- end of the recipe table -->")[0].strip() == recipe_table()


def test_every_method_is_on_the_page_and_the_tests_that_it_names_are_there() -> None:
    page = (CHECKOUT / "docs/support.md").read_text(encoding="utf-8")
    table = page.partition("| method or setting | on a CPU | on a GPU |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [name for name, *_ in rows][: len(Method)] == [method.value for method in Method]
    for cell in (cell for _, *cells in rows for cell in cells):
        staged = re.fullmatch(r"staged: (\w+) \(`(.+)`\)", cell)
        assert staged or not cell.startswith("staged")
        if staged:
            name, file = staged.groups()
            assert f"def {name}(" in (CHECKOUT / file).read_text(encoding="utf-8")


@pytest.mark.slow  # imports vLLM
def test_what_is_copied_from_vllm_is_theirs() -> None:
    from vllm.config.vllm import DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.models.registry import _VLLM_MODELS

    newest = {name for name in DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES if "MTP" not in name}
    assert newest == {*OWN_ATTENTION, "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}
    for name, package in OWN_ATTENTION.items():
        assert f"vllm.models.{package}" in _VLLM_MODELS[name][0]
    states = (QwenGatedDeltaNetAttention, MambaMixer2)
    assert tuple(STATE_LAYERS.values()) == tuple(layer.__name__ for layer in states)
    for path in FOLLOWED_ON_CPU | {p for p in FOLLOWED_ON_GPU if "flash" not in p.split(".")[-2]}:
        module, _, name = path.rpartition(".")
        kind = getattr(import_module(module), name)
        assert path_of(kind) == path
