"""Prompts that the target writes itself: which are used, which are dropped, and when to give up."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from refusals import refused
from transformers import AutoTokenizer

from nwor_bench.models.pairs.tiny import generate_tiny
from nwor_bench.models.training import self_written
from nwor_bench.models.training.data import (
    choose_prompts,
    held_out_prompts,
    load_data,
    make_data,
    more_prompts,
    save_data,
)
from nwor_bench.models.training.recipe import RECIPES, Recipe
from nwor_bench.models.training.self_written import TRIES, open_turn, plain, write_prompts
from nwor_bench.models.training.target import Target
from nwor_bench.workload.prompts import Prompt, encode

pytestmark = pytest.mark.slow  # transformers' models are imported

RECIPE = dataclasses.replace(
    RECIPES["tiny-eagle"], tokens=320, written_share=0.6, written_tokens=40, held_out=3,
    answer_tokens=16, held_out_tokens=(4, 12),
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    generate_tiny(folder)
    return folder / "target"


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(tiny))


class Scripted:
    """A target that writes given messages, 32 a batch, then none that ends."""

    device = "cpu"

    def __init__(self, tokenizer: Any, *texts: str | None):
        self._messages = [None if t is None else tokenizer.encode(t) for t in texts]
        self.asked: list[tuple[Any, ...]] = []

    def write(self, begin: Any, count: int, *how: Any) -> list[list[int] | None]:
        self.asked.append((begin, count, *how))
        now, self._messages = self._messages[:count], self._messages[count:]
        return now + [None] * (count - len(now))


def written(
    tokenizer: Any, *texts: str | None, wanted: int, held_out: tuple[str, ...] = (),
    taken: tuple[str, ...] = (), **changes: Any,
) -> tuple[self_written.SelfWritten, Scripted]:  # fmt: skip
    values = {"answer_tokens": 1, "tokens": wanted, "written_share": 1.0, "around_share": 0.0}
    recipe = dataclasses.replace(RECIPE, **values | changes)
    target = Scripted(tokenizer, *texts)
    steps: list[int] = []
    found = write_prompts(recipe, cast(Target, target), tokenizer, held_out, taken, steps.append)
    assert sum(steps) == len(found.prompts) == wanted
    return found, target


def in_template(tokenizer: Any, *texts: str) -> list[list[int]]:
    prompts = [Prompt(text, "x", text) for text in texts]
    return encode(prompts, tokenizer, max_model_len=10_000, max_new_tokens=0)


def test_the_open_turn_and_a_message_are_what_the_chat_template_renders(tokenizer: Any) -> None:
    turn = open_turn(tokenizer)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is it late?"}], tokenize=True, return_dict=False
    )
    assert [*turn.ids, *tokenizer.encode("Why is it late?"), turn.end] == rendered
    assert tokenizer.decode([turn.end]) == "<|end|>"


def test_the_template_s_own_system_prompt_comes_before_the_open_turn(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny))
    tokenizer.chat_template = "<|system|>Be kind.<|end|>" + tokenizer.chat_template
    assert tokenizer.decode(open_turn(tokenizer).ids) == "<|system|>Be kind.<|end|><|user|>"


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }} said the user"])
def test_a_target_without_turns_is_refused_before_it_is_loaded(
    tiny: Path, template: str | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny))
    tokenizer.chat_template = template
    with refused("target: chat_template"):
        choose_prompts(RECIPE, tokenizer)
    choose_prompts(dataclasses.replace(RECIPE, written_share=0.0), tokenizer)


def test_messages_are_kept_in_their_order_as_a_user_s_text_would_come(tokenizer: Any) -> None:
    found, target = written(
        tokenizer, "  What is the moon made of?\n", "Write a poem on rain.", "Left over, unused.",
        wanted=2,
    )  # fmt: skip
    assert found.prompts == in_template(
        tokenizer, "What is the moon made of?", "Write a poem on rain."
    )
    assert found.dropped == {"never ended": 29}
    turn = open_turn(tokenizer)
    assert target.asked == [(turn.ids, 32, turn.end, RECIPE.written_tokens, 1.0)]


def test_what_is_no_new_whole_message_is_dropped_and_counted(tokenizer: Any) -> None:
    held_out = "Name three rivers\nof Asia."
    found, _ = written(
        tokenizer,
        None,
        "Hello.",
        "A first useful question?",
        "a FIRST  useful question?",
        "Please help: name three rivers of asia. Thanks!",
        "Name three rivers of Asia.",
        "Who said <|user|> here and why?",
        "Explain tides to a child.",
        "word " * 40,
        "A second useful question?",
        *[None] * 30,
        "A third useful question?",
        wanted=3,
        held_out=(held_out,),
        taken=("Explain tides  to a child.",),
        prompt_tokens=60,
    )
    assert found.prompts == in_template(
        tokenizer, *(f"A {nth} useful question?" for nth in ("first", "second", "third"))
    )
    assert found.tries == 64
    assert found.dropped == {
        "never ended": 1 + 22 + 8 + 23, "too short": 1, "repeated": 2, "held out": 2,
        "with special tokens inside": 1, "too long": 1,
    }  # fmt: skip
    assert found.counts() == {
        "kept": 3, "around": 0, "tries": 64, "dropped": found.dropped, "seconds": found.seconds
    }  # fmt: skip


def test_a_share_of_the_messages_become_the_text_of_a_task(tokenizer: Any) -> None:
    texts = [f"Question {{number}} {n}?" for n in range(200)]
    found, _ = written(tokenizer, *texts, wanted=200, around_share=0.4)
    plain_ones = in_template(tokenizer, *texts)
    tasks = [i for i in range(200) if found.prompts[i] != plain_ones[i]]
    assert 50 < len(tasks) == found.around < 110
    for i in tasks:
        prompt = tokenizer.decode(found.prompts[i])
        assert texts[i] in prompt
        assert len(found.prompts[i]) > len(plain_ones[i]) + 10
    again, _ = written(tokenizer, *texts, wanted=200, around_share=0.4)
    assert again.prompts == found.prompts
    other, _ = written(tokenizer, *texts, wanted=200, around_share=0.4, seed=1)
    assert other.prompts != found.prompts


def test_too_few_prompts_are_one_message_and_not_an_endless_loop(tokenizer: Any) -> None:
    with refused("--tokens", value=1, naming="needs 20") as e:
        written(tokenizer, "A first useful question?", "Hi", wanted=20)
    tries = int(str(e.value).split("of ")[1].split()[0])
    assert TRIES * 20 <= tries <= TRIES * 20 + 2 * 32
    assert f"{tries - 2} never ended, 1 too short" in str(e.value)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    """One that has learnt to end its messages: random weights hardly ever do."""
    target = Target(str(tiny), "cpu", "float32")
    likelier = torch.zeros(264)
    likelier[256] = 4.0
    target._model.lm_head.register_forward_hook(lambda module, given, out: out + likelier)
    return target


def test_a_target_s_texts_stop_before_the_end_token_or_are_none(target: Target) -> None:
    torch.manual_seed(3)
    rows = target.write([5, 6, 7], 32, end=256, longest=60, temperature=1.0)
    ended = [row for row in rows if row is not None]
    assert 0 < len(ended) < len(rows) == 32
    assert all(256 not in row and len(row) < 60 for row in ended)
    assert len({tuple(row) for row in ended}) > 1
    torch.manual_seed(3)
    longer = target.write([5, 6, 7], 32, end=256, longest=90, temperature=1.0)
    assert sum(row is None for row in longer) <= sum(row is None for row in rows)


def generated(recipe: Recipe, target: Target, tokenizer: Any) -> Any:
    prompts = choose_prompts(recipe, tokenizer)
    own = more_prompts(recipe, target, tokenizer, prompts, lambda count: None)
    torch.seed()  # answers are drawn from the recipe's seed, not from where the prompts ended
    return prompts, own, make_data(recipe, target, prompts, own, lambda count: None)


@pytest.mark.long
def test_a_seed_gives_the_same_prompts_and_answers(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    prompts, own, data = generated(RECIPE, target, tokenizer)
    _, again, data_again = generated(RECIPE, target, tokenizer)
    assert again.prompts == own.prompts
    assert (data_again.training, data_again.held_out) == (data.training, data.held_out)
    other = dataclasses.replace(RECIPE, seed=1)
    assert generated(other, target, tokenizer)[1].prompts != own.prompts

    assert (len(own.prompts), len(prompts.templates)) == (12, 8)
    trained_on = [prompt for prompt, _ in data.training]
    assert sorted(trained_on) == sorted(own.prompts + prompts.templates)
    assert trained_on[:8] != prompts.templates  # mixed: either kind is answered in either way
    sampled = trained_on[: RECIPE.sampled_sequences]
    assert any(p in own.prompts for p in sampled)
    assert any(p in prompts.templates for p in sampled)
    assert {len(answer) for _, answer in data.training} == {16}
    assert {len(answer) for _, answer in data.held_out} == {12}
    assert data.self_written == own.counts()
    save_data(tmp_path / "sequences.json", data)
    assert load_data(tmp_path / "sequences.json") == data


def test_no_held_out_prompt_is_trained_on(
    target: Target, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = held_out_prompts()[5].text
    monkeypatch.setattr(
        Target, "write", Scripted(
            tokenizer, f"Please: {secret.upper()}", *(f"Question number {n}?" for n in range(31))
        ).write,
    )  # fmt: skip
    recipe = dataclasses.replace(RECIPE, prompt_tokens=1000)
    _, own, data = generated(recipe, target, tokenizer)
    assert own.dropped == {"held out": 1}
    for prompt, _ in data.training:
        text = plain(tokenizer.decode(prompt))
        assert not [p.text for p in held_out_prompts() if plain(p.text) in text]


def test_a_held_out_text_among_the_templates_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Prompt("x", "x", f"Well: {held_out_prompts()[0].text.lower()}")
    monkeypatch.setattr(
        "nwor_bench.models.training.data.training_prompts", lambda count, seed: [hidden] * count
    )
    with refused("held-out prompts among the training prompts"):
        choose_prompts(RECIPE, tokenizer)


def test_the_recipe_s_shares_add_up_and_survive_json() -> None:
    for recipe in RECIPES.values():
        assert recipe.self_written + recipe.from_templates == recipe.sequences
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert RECIPES["tiny-eagle"].self_written == 0  # random weights write no prompts
    assert RECIPES["smollm2-eagle"].self_written > RECIPES["smollm2-eagle"].from_templates
