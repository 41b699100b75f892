"""Training data: prompts from templates and from the target, answers from the target.

The scenarios' prompts are held out, so a run's acceptance is measured on prompts that the head was
not trained on.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.models.training.recipe import Recipe
from nwor_bench.models.training.self_written import (
    SelfWritten,
    contains_any,
    open_turn,
    plain,
    write_prompts,
)
from nwor_bench.models.training.target import GENERATED_TOGETHER, Target
from nwor_bench.models.training.templates import training_prompts
from nwor_bench.records.json_text import parse_json
from nwor_bench.workload.prompts import Prompt, builtin_categories, encode, read_jsonl
from nwor_bench.workload.resources import resource_dir

SPARE = 1.5
"""Template prompts made per prompt needed: some are longer than the recipe allows."""

Step = Callable[[int], None]
"""Called with the number of sequences that a finished batch added."""

Sequenced = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""


@dataclass(frozen=True)
class Prompts:
    """Prompts from templates and scenarios.

    Attributes:
        templates: training prompts, token ids.
        held_out: held-out prompts, token ids.
        texts: texts of all template prompts, including unused ones.
    """

    templates: list[list[int]]
    held_out: list[list[int]]
    texts: frozenset[str]


@dataclass(frozen=True)
class TrainingData:
    """Prompts and answers of a training.

    Attributes:
        training: prompts and answers to train on.
        held_out: held-out prompts and greedy answers.
        generating_s: time taken to generate the answers.
        self_written: counts of the prompts that the target wrote; None if it wrote none.
    """

    training: list[Sequenced]
    held_out: list[Sequenced]
    generating_s: float
    self_written: dict[str, Any] | None = None


def held_out_prompts() -> list[Prompt]:
    """All prompts of the shipped scenarios, alternating between categories."""
    folder = resource_dir("scenarios") / "prompts"
    kinds = [read_jsonl(folder / f"{name}.jsonl", name) for name in builtin_categories()]
    longest = max(map(len, kinds))
    return [kind[turn] for turn in range(longest) for kind in kinds if turn < len(kind)]


def choose_prompts(recipe: Recipe, tokenizer: Any) -> Prompts:
    """The template and held-out prompts that are short enough for the recipe.

    Raises ConfigError if there are too few, if a held-out prompt is among the training prompts, or
    if the target should write prompts but its tokenizer has no usable chat template.
    """
    held_out = held_out_prompts()
    texts = [plain(prompt.text) for prompt in held_out]
    from_templates = training_prompts(int(recipe.from_templates * SPARE) + 8, recipe.seed)
    both = [p.text for p in from_templates if contains_any(p.text, texts)]
    if both:
        raise ConfigError.at("held-out prompts among the training prompts", str(both[:3]), both[:3])
    if recipe.self_written:
        open_turn(tokenizer)
    return Prompts(
        _fitting(from_templates, recipe.prompt_tokens, tokenizer, recipe.from_templates),
        _fitting(held_out, recipe.prompt_tokens, tokenizer, recipe.held_out),
        frozenset(prompt.text for prompt in from_templates),
    )


def more_prompts(
    recipe: Recipe, target: Target, tokenizer: Any, prompts: Prompts, step: Step
) -> SelfWritten:
    """Have the target write the prompts that are not from templates."""
    held_out = [prompt.text for prompt in held_out_prompts()]
    return write_prompts(recipe, target, tokenizer, held_out, prompts.texts, step)


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
    recipe: Recipe, target: Target, prompts: Prompts, written: SelfWritten | None, step: Step
) -> TrainingData:
    """Generate the target's answer to every prompt.

    Training answers are greedy or sampled, in the recipe's proportion. Held-out answers are greedy,
    with the longest of the recipe's held-out lengths.
    """
    import torch

    torch.manual_seed(recipe.seed)
    began = time.perf_counter()
    training = prompts.templates + (written.prompts if written else [])
    Random(f"prompts:{recipe.seed}").shuffle(training)
    sampled = recipe.sampled_sequences
    tokens = recipe.answer_tokens
    found = _answers(target, training[:sampled], tokens, recipe.temperature, step)
    found += _answers(target, training[sampled:], tokens, 0.0, step)
    greedy = _answers(target, prompts.held_out, max(recipe.held_out_tokens), 0.0, step)
    seconds = round(time.perf_counter() - began, 3)
    return TrainingData(found, greedy, seconds, written.counts() if written else None)


def _answers(
    target: Target, prompts: Sequence[list[int]], tokens: int, temperature: float, step: Step
) -> list[Sequenced]:
    """Answers in the order of the prompts; prompts of similar length share a batch."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    together = GENERATED_TOGETHER[target.device]
    for begin in range(0, len(order), together):
        chosen = order[begin : begin + together]
        found = target.generate([prompts[i] for i in chosen], tokens, temperature)
        answers |= dict(zip(chosen, found, strict=True))
        step(len(chosen))
    return [(prompts[i], answers[i]) for i in range(len(prompts))]


def save_data(path: Path, data: TrainingData) -> None:
    """Write the sequences to disk, so that a resumed training uses the same ones."""
    temporary = path.with_suffix(".partial")
    content = json.dumps(vars(data))
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)


def load_data(path: Path) -> TrainingData:
    """Read what `save_data` wrote. Raises StoreError for a damaged file."""
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
        training, held_out = (
            [(p, a) for p, a in stored[name]] for name in ("training", "held_out")
        )
        generating_s, written = float(stored["generating_s"]), stored["self_written"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError.at(path, f"cannot be read ({error}); start a new training") from error
    return TrainingData(training, held_out, generating_s, written)
