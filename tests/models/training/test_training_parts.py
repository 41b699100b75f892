"""The parts of training, each against a plain rendering of what it is meant to compute."""

import dataclasses
import io
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from nwor_bench.cli.commands.pairs import app
from nwor_bench.errors import StoreError
from nwor_bench.models.training.acceptance import accepted_drafts, measure_acceptance, walk
from nwor_bench.models.training.card import write_card
from nwor_bench.models.training.data import (
    SPARE,
    TrainingData,
    held_out_prompts,
    load_data,
    save_data,
)
from nwor_bench.models.training.eagle_head import EagleHead, head_config, unroll, write_head
from nwor_bench.models.training.folder import (
    CHECKPOINT,
    Position,
    begin_folder,
    load_checkpoint,
    resumed_recipe,
    save_checkpoint,
)
from nwor_bench.models.training.progress import TrainingProgress
from nwor_bench.models.training.recipe import RECIPES, Recipe
from nwor_bench.models.training.target import Target, require_llama
from nwor_bench.models.training.templates import training_prompts
from nwor_bench.models.training.train import learning_rate
from nwor_bench.models.training.training_step import Batches

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "intermediate_size": 40,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500.0, "num_hidden_layers": 3,
}  # fmt: skip
TINY = RECIPES["tiny-eagle"]


def small_head(seed: int) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(CONFIG).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return head


def one_token(
    head: EagleHead, embed: Tensor, hidden: Tensor, at: int, cache: list[Tensor]
) -> Tensor:
    """The head for one token at position `at`; `cache` holds (keys, values) seen so far, by rows.

    Rotation is by complex numbers: pairs (i, i + half) of a head turn by at * theta^(-i / half).
    """
    weights = dict(head.named_parameters())

    def linear(name: str, row: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ row

    def turn(rows: Tensor) -> Tensor:
        half = rows.shape[-1] // 2
        powers = torch.tensor([500.0 ** -(i / half) for i in range(half)], dtype=torch.float64)
        spun = torch.complex(rows[:, :half], rows[:, half:]) * torch.exp(1j * at * powers)
        return torch.cat([spun.real, spun.imag], dim=1)

    x = linear("fc", torch.cat([embed, hidden]))
    attention = "layers.0.self_attn"
    q = turn(linear(f"{attention}.q_proj", x).view(4, 8))
    k = turn(linear(f"{attention}.k_proj", x).view(2, 8))
    v = linear(f"{attention}.v_proj", x).view(2, 8)
    cache.append(torch.stack([k, v]))
    out = []
    for query in range(4):
        keys = torch.stack([pair[0][query // 2] for pair in cache])
        values = torch.stack([pair[1][query // 2] for pair in cache])
        out.append(torch.softmax(keys @ q[query] / 8**0.5, 0) @ values)
    x = x + linear(f"{attention}.o_proj", torch.cat(out))
    mean_square = x.square().mean() + 1e-5
    y = x / mean_square.sqrt() * weights["layers.0.post_attention_layernorm.weight"]
    gate, up = linear("layers.0.mlp.gate_proj", y), linear("layers.0.mlp.up_proj", y)
    return x + linear("layers.0.mlp.down_proj", gate * torch.sigmoid(gate) * up)


@pytest.mark.slow
@torch.no_grad()
def test_unrolled_drafts_equal_windows_drafted_one_token_at_a_time() -> None:
    """Every window as a drafter runs it: true states up to its begin, then the head's own."""
    head = small_head(3)
    embeds, hidden = torch.randn(2, 11, 24, dtype=torch.float64).split(1)
    steps = unroll(head, embeds, hidden, draft_tokens=4)
    for begin in range(10 - 4):
        cache: list[Tensor] = []
        for at in range(begin + 1):
            known = one_token(head, embeds[0, at + 1], hidden[0, at], at, cache)
        for j in range(4):
            torch.testing.assert_close(steps[j][0, begin + j], known, rtol=1e-4, atol=1e-4)
            at = begin + j + 1
            known = one_token(head, embeds[0, at + 1], known, at, cache)


@pytest.mark.slow
@given(st.integers(1, 4), st.lists(st.integers(0, 2), min_size=8, max_size=40), st.randoms())
def test_acceptance_counts_windows_as_a_loop_would(k, ids, random) -> None:  # type: ignore[no-untyped-def]
    drafts = [[random.randint(0, 2) for _ in ids[:-1]] for _ in range(k)]
    first = random.randint(0, 3)
    counts, windows, begin = [0] * k, 0, first
    while begin + 1 + k < len(ids):
        windows += 1
        gained = 1
        for j in range(k):
            if drafts[j][begin + j] != ids[begin + j + 2]:
                break
            counts[j] += 1
            gained += 1
        begin += gained
    accepted = accepted_drafts(torch.tensor(drafts), torch.tensor(ids)).tolist()
    found = walk(accepted, first, k)
    assert (found.windows, list(found.accepted)) == (windows, counts)
    assert (found.length is None) == (windows == 0)
    if windows:
        assert found.length == pytest.approx(1 + sum(counts) / windows)


class Repeating:
    """A target of random states, whose tokens are read off a random output layer."""

    device = "cpu"

    def __init__(self, head_seed: int):
        generator = torch.Generator().manual_seed(head_seed)
        self._embeds = torch.randn(7, 24, dtype=torch.float64, generator=generator)
        self._out = torch.randn(24, 7, dtype=torch.float64, generator=generator)

    def embed(self, ids: Tensor) -> Tensor:
        return self._embeds[ids]

    def hidden_states(self, ids: Tensor) -> Tensor:
        return self.embed(ids).cumsum(1).tanh()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._out


@pytest.mark.slow
def test_acceptance_over_the_first_tokens_is_that_of_shorter_answers() -> None:
    head, target = small_head(5), cast(Target, Repeating(6))
    random = Random(7)

    def ids(count: int) -> list[int]:
        return [random.randrange(7) for _ in range(count)]

    whole = [(ids(random.randint(3, 9)), ids(24)) for _ in range(12)]
    short, long = measure_acceptance(head, target, whole, 3, (9, 24))
    cut = [(prompt, answer[:9]) for prompt, answer in whole]
    assert [short] == measure_acceptance(head, target, cut, 3, (9,))
    assert [long] == measure_acceptance(head, target, whole, 3, (24,))
    assert sum(short.accepted) > 0
    assert short.windows < long.windows


@pytest.mark.slow
@given(st.integers(1, 90), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_takes_every_sequence_once_in_an_order_of_the_seed(count, batch, seed) -> None:  # type: ignore[no-untyped-def]
    recipe = dataclasses.replace(
        TINY, tokens=4 * count, answer_tokens=4, batch=batch, seed=seed, epochs=2
    )
    random = Random(seed)
    training = [([i, *range(random.randint(0, 30))], [i] * 4) for i in range(count)]
    batches = Batches(recipe, training, "cpu")
    orders = []
    for epoch in range(2):
        order: list[int] = []
        for index in range(recipe.steps_per_epoch):
            step = epoch * recipe.steps_per_epoch + index
            found, again = batches.batch(step), Batches(recipe, training, "cpu").batch(step)
            assert torch.equal(found.ids, again.ids)
            for row, begin, end in zip(found.ids, found.begins, found.ends, strict=True):
                prompt, answer = training[int(row[0])]
                assert row[:begin].tolist() == prompt
                assert row[begin:end].tolist() == answer
            order += found.ids[:, 0].tolist()
        assert sorted(order) == list(range(count))
        orders.append(order)
    assert count < 20 or orders[0] != orders[1]


@pytest.mark.slow
def test_sequences_of_like_length_share_a_batch() -> None:
    recipe = dataclasses.replace(TINY, tokens=4 * 2000, answer_tokens=4, batch=20)
    random = Random(2)
    training = [([1] * random.randint(20, 150), [1] * 4) for _ in range(2000)]
    batches = [Batches(recipe, training, "cpu").batch(step) for step in range(100)]
    padded = sum(found.ids.numel() for found in batches)
    real = sum(len(prompt) + 4 for prompt, _ in training)
    assert real <= padded < 1.1 * real
    # Short and long batches take turns: no long stretch of steps grows from short to long.
    widths = [found.ids.shape[1] for found in batches]
    assert not [i for i in range(92) if widths[i : i + 8] == sorted(widths[i : i + 8])]


def acceptance(tokens: int, length: float | None) -> dict[str, Any]:
    rates = None if length is None else [0.5, 0.25]
    return {
        "answer_tokens": tokens, "windows": 8, "accepted": [4, 2], "acceptance_length": length,
        "rates": rates,
    }  # fmt: skip


def card_of(tmp_path: Path, written: dict[str, Any] | None) -> str:
    recipe = dataclasses.replace(RECIPES["smollm2-eagle"], draft_tokens=2)
    row = {"epoch": 0, "loss": None, "cross_entropy": None, "smooth_l1": None}
    record = {
        "recipe": recipe.to_dict(), "target": "T", "dtype": "bfloat16", "parameters": 5,
        "steps": 9, "training_s": 3.0, "machine": "M", "weights_sha256": "ab",
        "software": {"torch": "1", "transformers": "2"},
        "epochs": [{**row, "held_out": [acceptance(32, 1.625), acceptance(256, 2.875)]}],
        "data": {
            "training_sequences": 100, "prompts_from_templates": 30, "prompts_self_written": 70,
            "self_written": written, "sampled_sequences": 50, "training_tokens": 9600,
            "held_out_sequences": 64, "generating_s": 12.0,
        },
    }  # fmt: skip
    write_card(tmp_path / "README.md", record)
    return (tmp_path / "README.md").read_text()


def test_the_card_says_whose_prompts_and_which_answers(tmp_path: Path) -> None:
    dropped = {"never ended": 1234, "repeated": 5}
    card = card_of(tmp_path, {"kept": 70, "around": 28, "tries": 4096, "dropped": dropped,
                              "seconds": 41.2})  # fmt: skip
    data = card.split("## Data")[1].split("## Training")[0]
    assert "| prompts from templates | 30 |" in data
    assert "| prompts written by the target | 70 |" in data
    assert "| of these tasks about a message | 28 |" in data
    assert "| messages written for them | 4,096 in 41 s |" in data
    assert "| messages dropped | 1,234 never ended, 5 repeated |" in data
    short, long = card.split("### Over the first ")[1:]
    assert short.startswith("32 tokens of an answer\n")
    assert "| 1.625 | 0.500 | 0.250 |" in short
    assert long.startswith("256 tokens of an answer\n")
    assert "| 2.875 | 0.500 | 0.250 |" in long
    assert "message" not in card_of(tmp_path, None)


def test_an_epoch_s_line_says_over_which_tokens() -> None:
    console = Console(file=io.StringIO(), width=300)
    row = {"epoch": 2, "loss": 1.5, "held_out": [acceptance(32, 1.75), acceptance(256, None)]}
    TrainingProgress(console).epoch(row, epochs=6)
    line = cast(io.StringIO, console.file).getvalue()
    assert "1.75 over the first 32 tokens of an answer (by position 0.50 0.25)" in line
    assert "unknown over the first 256 tokens" in line


@pytest.mark.slow
def test_training_prompts_are_many_and_never_held_out() -> None:
    prompts = training_prompts(3000, seed=0)
    texts = [prompt.text for prompt in prompts]
    assert len(set(texts)) == 3000
    assert not set(texts) & {prompt.text for prompt in held_out_prompts()}
    assert not [text for text in texts if "{" in text or "}" in text]
    assert texts[:500] == [prompt.text for prompt in training_prompts(500, seed=0)]
    assert texts[:500] != [prompt.text for prompt in training_prompts(500, seed=1)]


@pytest.mark.slow
def test_templates_hold_enough_for_the_shipped_recipe() -> None:
    recipe = RECIPES["smollm2-eagle"]
    assert len(training_prompts(int(recipe.from_templates * SPARE) + 8, 0)) > recipe.from_templates


def test_held_out_prompts_are_all_of_the_scenarios() -> None:
    prompts = held_out_prompts()
    lines = [
        line
        for path in Path("scenarios/prompts").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(prompts) == len(lines) == len({prompt.id for prompt in prompts})
    assert len({prompt.category for prompt in prompts[:6]}) == 6


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(TINY, step) for step in range(TINY.steps)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(TINY.learning_rate)
    assert 0 < rates[0] <= max(rates)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.1 * max(rates)


def test_written_head_has_vllms_names_and_the_targets_sizes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    head = small_head(1)
    write_head(tmp_path, head, CONFIG, "bfloat16")
    weights = load_file(tmp_path / "model.safetensors")
    attention = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norm = "layers.0.post_attention_layernorm.weight"
    assert sorted(weights) == sorted(["fc.weight", norm, *attention, *mlp])
    assert weights["fc.weight"].shape == (24, 48)
    for name, weight in head.state_dict().items():
        assert torch.equal(weights[name], weight.to(torch.bfloat16))
    config = head_config(CONFIG, "bfloat16")
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["rope_theta"]) == (1, 500.0)


@pytest.mark.slow
def test_a_checkpoint_comes_back_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    head, other = small_head(1), small_head(2)
    optimizer = torch.optim.AdamW(head.parameters())
    sum(weight.square().sum() for weight in head.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    at = Position(7, {"loss": 1.5}, [{"epoch": 0}], 2.0)
    save_checkpoint(tmp_path, head, optimizer, at)
    again = torch.optim.AdamW(other.parameters())
    assert load_checkpoint(tmp_path, other, again, "cpu") == at
    assert all(
        torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True)
    )
    assert again.state_dict()["state"][0]["step"] == 1
    whole = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[: len(whole) // 2])
    with refused(tmp_path / CHECKPOINT, StoreError):
        load_checkpoint(tmp_path, other, again, "cpu")
    (tmp_path / CHECKPOINT).unlink()
    with refused("--resume", value=str(tmp_path), naming=CHECKPOINT):
        load_checkpoint(tmp_path, other, again, "cpu")


def test_sequences_come_back_and_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "sequences.json"
    data = TrainingData([([1, 2], [3])], [([4], [5, 6])], 1.5)
    save_data(path, data)
    assert load_data(path) == data
    path.write_text(path.read_text()[:-9])
    with refused(path, StoreError, cause=ValueError):
        load_data(path)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen3ForCausalLM"]},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"attention_bias": True},
    ],
)
def test_targets_that_the_head_does_not_compute_are_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    import json

    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    [(name, value)] = change.items()
    with refused(f"target: {name}", value=value):
        require_llama(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert require_llama(str(tmp_path)) == CONFIG


def test_resuming_needs_the_same_values(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    recipe = dataclasses.replace(TINY, epochs=2)
    begin_folder(folder, recipe)
    assert resumed_recipe(folder, "tiny-eagle", {"epochs": 2, "seed": None}) == recipe
    with refused("--epochs", value=3, naming="2"):
        resumed_recipe(folder, "tiny-eagle", {"epochs": 3})
    with refused("drafter", value="smollm2-eagle", naming="tiny-eagle"):
        resumed_recipe(folder, "smollm2-eagle", {})
    with refused("--output", value=str(folder), cause=None, naming="--resume"):
        begin_folder(folder, recipe)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("arguments", "field", "wanted"),
    [
        (["tiny-eagel"], "drafter", {"value": "tiny-eagel", "near": "tiny-eagle"}),
        (["tiny-eagle", "--epochs", "0"], "--epochs", {"value": 0}),
        (["tiny-eagle", "--tokens", "3"], "--tokens", {"value": 3, "naming": "64"}),
        (["tiny-eagle", "--seed", "-1"], "--seed", {"value": -1}),
        (["tiny-eagle", "--device", "tpu"], "--device", {"value": "tpu"}),
        (["smollm2-eagle"], "--device", {"naming": "6,000,000 tokens"}),
        (["tiny-eagle", "--resume", "nowhere"], "--resume", {"value": "nowhere"}),
        (["tiny-eagle", "--resume", "a", "--output", "b"], "--output", {"value": "b"}),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    arguments: list[str],
    field: str,
    wanted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NWOR_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(field, **wanted):
        CliRunner().invoke(app, ["train", *arguments], catch_exceptions=False)
    assert not list(tmp_path.iterdir())
