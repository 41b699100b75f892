"""What the plugin would stage of a model, from its config.json: one config for each class."""

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from recipe_models import LEFT_OUT, recipe_table, recipes
from refusals import refused
from small_configs import PLAIN, SLIDING

from nwor_bench.instruments.cards import Device
from nwor_bench.models.methods import NOT_ON_CPU, Method
from nwor_bench.models.pairs.local import find_config
from nwor_bench.models.support.facts import (
    OWN_ATTENTION,
    STATE_LAYERS,
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
from nwor_bench.report.support import layers_table

CHECKOUT = Path(__file__).parents[2]
FIELD = "MODEL"


def facts(**changes: Any) -> ModelFacts:
    return read_facts({**PLAIN, **changes}, "m", FIELD, "m")


def test_layers_are_told_by_kind() -> None:
    """Recurrent layers stay as they are, whatever becomes of the others; one attention layer that
    is written directly takes all."""
    rows = layers_table(predict_support(facts(**SLIDING), EngineFacts())).rows
    assert [(row[0], row[3]) for row in rows] == [("2", "staged")] * 2
    assert rows[0][1] == "sliding attention of 32, head size 64"
    blocks = predict_support(facts(hybrid_override_pattern="M-M*"), EngineFacts())
    assert [row[3] for row in layers_table(blocks).rows] == [
        "written directly: recurrent layers keep a state and no K/V", "without K/V", "staged",
    ]  # fmt: skip
    support = predict_support(facts(**SLIDING), EngineFacts())
    refused = replace(support.groups[0], reason="cache_dtype:nvfp4")
    mixed = replace(support, groups=(refused, support.groups[1]), reason=refused.reason)
    assert [row[3] for row in layers_table(mixed).rows] == [
        "written directly: our kernels cannot read such a cache (nvfp4)",
        "written directly, as in the other layers",
    ]


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "Qwen3ForSequenceClassification"])
def test_a_model_that_generates_no_text_is_refused(architecture: str) -> None:
    with refused(FIELD, naming=architecture):
        facts(architectures=[architecture])


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
