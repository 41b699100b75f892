"""Training text: prompts from templates, answers by the target. Held out: the scenarios' prompts.

No prompt of a shipped scenario is trained on, so acceptance in any sweep over them is measured
on held-out prompts.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.prompts import Prompt, builtin_categories, encode, read_jsonl
from nwor_bench.resources import resource_dir
from nwor_bench.training.recipe import Recipe
from nwor_bench.training.target import Target
from nwor_bench.training.templates import training_prompts

GENERATED_TOGETHER = {"cpu": 32, "cuda": 1024}
"""Answers that are generated in one batch: enough to keep the device busy."""

SPARE = 1.5
"""Prompts asked of the templates for each one needed: some are longer than the recipe allows."""

Step = Callable[[int], None]
"""Told how many sequences a finished batch added."""

Sequenced = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""


@dataclass(frozen=True)
class Data:
    """Training sequences, held-out ones with greedy answers, and how long generating took."""

    training: list[Sequenced]
    held_out: list[Sequenced]
    generating_s: float


def held_out_prompts() -> list[Prompt]:
    """All prompts of the shipped scenarios, categories in turn."""
    folder = resource_dir("scenarios") / "prompts"
    kinds = [read_jsonl(folder / f"{name}.jsonl", name) for name in builtin_categories()]
    longest = max(map(len, kinds))
    return [kind[turn] for turn in range(longest) for kind in kinds if turn < len(kind)]


def choose_prompts(recipe: Recipe, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the training and of the held-out prompts, short enough for the recipe.

    Raises ConfigError when there are too few, or when a prompt would be both.
    """
    held_out = held_out_prompts()
    training = training_prompts(int(recipe.sequences * SPARE) + 8, recipe.seed)
    if both := {prompt.text for prompt in held_out} & {prompt.text for prompt in training}:
        raise ConfigError(f"held-out prompts among the training prompts: {sorted(both)[:3]}")
    training_ids = _fitting(training, recipe.prompt_tokens, tokenizer, recipe.sequences)
    held_out_ids = _fitting(held_out, recipe.prompt_tokens, tokenizer, recipe.held_out)
    return training_ids, held_out_ids


def _fitting(prompts: list[Prompt], longest: int, tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts that are no longer than `longest` tokens."""
    fitting: list[list[int]] = []
    for prompt in prompts:
        ids = encode([prompt], tokenizer, max_model_len=1 << 30, max_new_tokens=0)[0]
        if len(ids) <= longest:
            fitting.append(ids)
        if len(fitting) == count:
            return fitting
    raise ConfigError(
        f"{len(fitting)} of {len(prompts)} prompts have at most {longest} tokens, and the "
        f"recipe needs {count}; write fewer --tokens"
    )


def make_data(
    recipe: Recipe,
    target: Target,
    prompts: tuple[list[list[int]], list[list[int]]],
    step: Step,
) -> Data:
    """Have the target answer every prompt; `prompts` are those of `choose_prompts`.

    Training answers are greedy or sampled in the recipe's proportion; held-out ones greedy.
    """
    import torch

    torch.manual_seed(recipe.seed)
    began = time.perf_counter()
    training, held_out = prompts
    sampled = recipe.sampled_sequences
    found = _answers(recipe, target, training[:sampled], recipe.temperature, step)
    found += _answers(recipe, target, training[sampled:], 0.0, step)
    greedy = _answers(recipe, target, held_out, 0.0, step)
    return Data(found, greedy, round(time.perf_counter() - began, 3))


def _answers(
    recipe: Recipe,
    target: Target,
    prompts: Sequence[list[int]],
    temperature: float,
    step: Step,
) -> list[Sequenced]:
    """Prompts of like length are answered together, so that little is padded."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    together = GENERATED_TOGETHER[target.device]
    for begin in range(0, len(order), together):
        chosen = order[begin : begin + together]
        found = target.generate([prompts[i] for i in chosen], recipe.answer_tokens, temperature)
        answers |= dict(zip(chosen, found, strict=True))
        step(len(chosen))
    return [(prompts[i], answers[i]) for i in range(len(prompts))]


def save_data(path: Path, data: Data) -> None:
    """Keep the sequences, so that a resumed training goes on with the same ones."""
    temporary = path.with_suffix(".partial")
    content = json.dumps(vars(data))
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)


def load_data(path: Path) -> Data:
    """Read back what `save_data` wrote. Raises StoreError for a damaged file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        training, held_out = (
            [(p, a) for p, a in stored[name]] for name in ("training", "held_out")
        )
        generating_s = float(stored["generating_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); start the training anew") from error
    return Data(training, held_out, generating_s)
