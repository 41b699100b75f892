"""A small training from end to end: it learns, resumes bit for bit, and vLLM drafts with it."""

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.errors import ExitCode
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.models.training.acceptance import Acceptance, measure_acceptance
from nwor_bench.models.training.eagle_head import EagleHead
from nwor_bench.models.training.folder import begin_folder
from nwor_bench.models.training.recipe import RECIPES, Recipe
from nwor_bench.models.training.target import Target
from nwor_bench.models.training.train import train_head
from nwor_bench.records.store import read_run
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.config import load_scenario, resolve

pytestmark = [pytest.mark.engine, pytest.mark.long]

RECIPE = dataclasses.replace(
    RECIPES["tiny-eagle"], tokens=6144, epochs=2, held_out=6, prompt_tokens=120, batch=8
)


class Killed(Exception):
    """What stops a training in the middle of an epoch."""


@pytest.fixture(autouse=True)
def same_environment(own_surroundings: None) -> Iterator[None]:
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


def train(recipe: Recipe, folder: Path, after: Callable[[int], None] | None = None) -> dict:  # type: ignore[type-arg]
    return train_head(recipe, folder, "cpu", Console(file=io.StringIO()), after)


def test_a_killed_training_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = dataclasses.replace(RECIPE, tokens=1536, held_out=2, written_share=0.5)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        begin_folder(folder, recipe)
    batches: list[int] = []

    def write(self: Target, begin: Any, count: int, *how: Any) -> list[list[int]]:
        """Random letters: random weights hardly ever end a message."""
        batches.append(count)
        return torch.randint(64, 90, (count, 30)).tolist()

    monkeypatch.setattr(Target, "write", write)
    train(recipe, whole)
    monkeypatch.setattr("nwor_bench.models.training.train.SAVE_EVERY_S", 0.0)

    def kill(step: int) -> None:
        if step in (2, 4):
            raise Killed

    def kill_answers(*arguments: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "generate", kill_answers)
        with pytest.raises(Killed):
            train(recipe, cut)
    with pytest.raises(Killed):
        train(recipe, cut, kill)
    with pytest.raises(Killed):
        train(recipe, cut, kill)
    record = train(recipe, cut)
    assert len(batches) == 3  # once for the one, twice for the other: before and after the kill
    assert record["steps"] == recipe.steps == 6
    name = "head/model.safetensors"
    assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert record["weights_sha256"] == hashlib.sha256((cut / name).read_bytes()).hexdigest()
    stored = [json.loads((f / "head/training.json").read_text())["epochs"] for f in (whole, cut)]
    assert stored[0] == stored[1]
    found = [json.loads((f / "sequences.json").read_text()) for f in (whole, cut)]
    assert found[0]["training"] == found[1]["training"]
    assert record["data"]["prompts_self_written"] == record["data"]["self_written"]["kept"] == 12


def simulated(head_folder: Path, answered: list[tuple[list[int], list[int]]]) -> Acceptance:
    """Acceptance of a head's files on the target's own answers."""
    pair = resolve_pair("tiny")
    head = EagleHead(json.loads((Path(pair.target) / "config.json").read_text()))
    head.load_state_dict(load_file(head_folder / "model.safetensors"))
    return measure_acceptance(head, Target(pair.target, "cpu", "float32"), answered, 4, [48])[0]


def test_a_trained_head_learns_and_vllm_drafts_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "training"
    begin_folder(folder, RECIPE)
    record = train(RECIPE, folder)
    untrained, first, last = (record["epochs"][i] for i in (0, 1, -1))
    assert last["loss"] < first["loss"]
    for index, tokens in enumerate((32, 64)):
        assert last["held_out"][index]["answer_tokens"] == tokens
        assert untrained["held_out"][index]["acceptance_length"] < 1.1
        assert last["held_out"][index]["acceptance_length"] > 1.4
    assert last["held_out"][0]["windows"] < last["held_out"][1]["windows"]
    card = (folder / "head" / "README.md").read_text()
    assert f"{last['held_out'][0]['acceptance_length']:.3f}" in card

    choice = PairChoice(pair="tiny", draft_model=str(folder / "head"))
    values = {"requests": 4, "batches": 3, "warmup": 1, "max_new_tokens": 48, "max_model_len": 1024}
    spec = resolve(
        load_scenario("short"), **values, nwor_modes="off,stage", scv_modes="off", max_warmup=1
    )
    outputs: list[tuple[list[int], BatchOutput]] = []

    class Recording(VllmEngine):
        def generate(self, prompts: Any, sampling: Sampling) -> BatchOutput:
            output = super().generate(prompts, sampling)
            outputs.append((prompts, output))
            return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        code = run_one(spec, choice, RunOptions(output=tmp_path / "run"), engine_factory=Recording)
    assert code is ExitCode.OK  # the gate compared the tokens of off and stage
    run = read_run(tmp_path / "run")
    assert run.header.pair.method == "eagle"
    assert run.header.parity.rule == "exact"
    assert run.header.parity.broken == {}

    prompts, output = outputs[-1]
    answered = [(list(p), list(ids)) for p, ids in zip(prompts, output.token_ids, strict=True)]
    found = simulated(folder / "head", answered)
    counted = output.counters
    # vLLM also counts each request's last window, which ends before its drafts could be validated.
    assert 0 <= counted.num_drafts - found.windows <= 2 * len(answered)
    for ours, vllms in zip(found.accepted, counted.accepted_per_position, strict=True):
        assert 0 <= vllms - ours <= 2 * len(answered)
