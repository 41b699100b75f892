"""The head that ships: what its recipe makes, what vLLM loads, what its card says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nwor_bench.pairs import load_pair
from nwor_bench.training.card import write_card
from nwor_bench.training.model import EagleHead
from nwor_bench.training.recipe import find_recipe

PAIR = load_pair("smollm2-eagle")
assert PAIR.packaged is not None
assert PAIR.packaged.drafter is not None
FOLDER = Path(PAIR.packaged.drafter)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((FOLDER / "training.json").read_text())


def test_it_drafts_for_the_target_of_the_default_pair() -> None:
    target = load_pair("smollm2").packaged
    assert target is not None
    assert PAIR.packaged == target.model_copy(update={"drafter": str(FOLDER)})


def test_the_recipe_of_today_is_the_one_that_made_it(record: dict) -> None:
    assert find_recipe("smollm2-eagle").to_dict() == record["recipe"]


def test_its_weights_are_those_of_the_layer_that_is_trained(record: dict) -> None:
    head = EagleHead(json.loads((FOLDER / "config.json").read_text()))
    wanted = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    with safe_open(FOLDER / "model.safetensors", "pt") as stored:
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == wanted
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == record["parameters"]
    assert all(weight.isfinite().all() and weight.any() for weight in weights.values())


def test_its_card_says_what_was_recorded(record: dict, tmp_path: Path) -> None:
    write_card(tmp_path / "card.md", record)
    assert (FOLDER / "README.md").read_text() == (tmp_path / "card.md").read_text()
