"""The head that ships: what its recipe makes, what vLLM loads, what its card says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nwor_bench.models.pairs import DEFAULT_PAIR, load_pair, pair_folder
from nwor_bench.models.pairs.compressed import WEIGHTS, unpacked
from nwor_bench.models.training.card import write_card
from nwor_bench.models.training.eagle_head import EagleHead
from nwor_bench.models.training.recipe import Recipe, find_recipe
from nwor_bench.workload.config import load_scenario

PAIR = load_pair(DEFAULT_PAIR)
assert PAIR.packaged is not None
assert PAIR.packaged.drafter is not None
FOLDER = Path(PAIR.packaged.drafter)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((FOLDER / "training.json").read_text())


def test_it_drafts_in_the_default_pair_and_prompt_lookup_in_the_other() -> None:
    lookup = load_pair("smollm2-ngram")
    assert (PAIR.method, lookup.method) == ("eagle", "ngram")
    assert lookup.packaged == PAIR.packaged.model_copy(update={"drafter": None})
    assert pair_folder(lookup) == pair_folder(PAIR)  # one build of the target serves both
    assert lookup.dtype == PAIR.dtype


def test_the_recipe_of_today_is_the_one_that_made_it(record: dict) -> None:
    recipe = find_recipe(FOLDER.name)
    assert recipe == Recipe.from_dict(record["recipe"])
    assert recipe.pair == record["target"] == DEFAULT_PAIR


def test_it_gains_what_we_want_of_it(record: dict) -> None:
    """At least 2.0 tokens a window of held-out prompts, over as many tokens as `short` has."""
    held_out = {found["answer_tokens"]: found for found in record["epochs"][-1]["held_out"]}
    found = held_out[load_scenario("short").max_new_tokens]
    assert 1 + sum(found["accepted"]) / found["windows"] >= 2.0


@pytest.mark.slow
def test_its_weights_are_those_of_the_layer_that_is_trained(record: dict, tmp_path: Path) -> None:
    head = EagleHead(json.loads((FOLDER / "config.json").read_text()))
    wanted = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    folder = Path(unpacked(str(FOLDER), tmp_path, print))
    with safe_open(folder / WEIGHTS, "pt") as stored:
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == wanted
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == record["parameters"]
    assert all(weight.isfinite().all() and weight.any() for weight in weights.values())


def test_its_card_says_what_was_recorded(record: dict, tmp_path: Path) -> None:
    write_card(tmp_path / "card.md", record)
    assert (FOLDER / "README.md").read_text() == (tmp_path / "card.md").read_text()
