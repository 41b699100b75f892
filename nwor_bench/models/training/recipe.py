"""What is trained and how: one recipe a head. Pure."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from nwor_bench.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """All that the trained weights depend on, besides the machine.

    Attributes:
        pair: the pair whose target is drafted for; its weights are not changed.
        tokens: tokens of the target's answers to train on, over all sequences.
        answer_tokens: length of each answer; as in sweeps it goes on past the end of the text.
        prompt_tokens: longest prompt that is used, training and held out alike.
        written_share: share of training prompts that the target writes itself; the others are
            filled in from templates.
        around_share: share of those that become the text of a task (to summarise it, translate
            it, find something in it); the others are prompts as they are.
        written_tokens: within how many tokens such a prompt must end, to be used.
        held_out: prompts of the scenarios on which acceptance is measured.
        held_out_tokens: answer lengths over which it is measured.
        sampled_share: share of training answers drawn at `temperature`; the others are greedy.
        batch: sequences a step.
        draft_tokens: drafts a window, in training and in the measured acceptance.
        learning_rate: AdamW's, at its highest.
        hidden_weight: weight of the smooth-L1 loss beside the cross-entropy's 1.
        step_decay: weight of each further draft's loss, relative to the one before.
    """

    name: str
    pair: str
    tokens: int
    epochs: int
    seed: int = 0
    answer_tokens: int = 256
    prompt_tokens: int = 256
    written_share: float = 0.0
    around_share: float = 0.4
    written_tokens: int = 128
    held_out: int = 64
    held_out_tokens: tuple[int, ...] = (32, 256)
    sampled_share: float = 0.5
    temperature: float = 0.8
    batch: int = 32
    draft_tokens: int = 4
    learning_rate: float = 1e-3
    hidden_weight: float = 0.1
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("seed", 0), ("tokens", self.answer_tokens)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError.for_field(f"--{name}", value, f"write {least} or more")

    @property
    def sequences(self) -> int:
        """Training sequences: one answer each."""
        return self.tokens // self.answer_tokens

    @property
    def self_written(self) -> int:
        """Training prompts that the target writes itself."""
        return round(self.sequences * self.written_share)

    @property
    def from_templates(self) -> int:
        """Training prompts from templates."""
        return self.sequences - self.self_written

    @property
    def sampled_sequences(self) -> int:
        """Training sequences whose answers are drawn, not greedy."""
        return int(self.sequences * self.sampled_share)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps an epoch; the last may hold fewer sequences."""
        return -(-self.sequences // self.batch)

    @property
    def steps(self) -> int:
        """Optimiser steps in all."""
        return self.epochs * self.steps_per_epoch

    def with_values(self, **values: int | None) -> Self:
        """The recipe with the values that are not None."""
        changes: dict[str, Any] = {k: v for k, v in values.items() if v is not None}
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Recipe":
        """Read back what `to_dict` gave. Raises KeyError for a value that is missing."""
        values = {field.name: stored[field.name] for field in fields(cls)}
        return cls(**values | {"held_out_tokens": tuple(values["held_out_tokens"])})


RECIPES = {
    recipe.name: recipe
    for recipe in (
        # Answers of 96 tokens, so that a third of the loss is on the first 32 of them, as many as
        # the scenario `short` generates: 62,500 answers, 46,875 of them to prompts that the
        # target wrote. 782 steps an epoch of 80 sequences each: 7,680 answer tokens and, with
        # prompts of 67 on average, 13,000 tokens in all. On one H200 the 6 epochs = 4,692 steps
        # took 474 s, the answers 144 s and the messages (four of five were usable) 178 s.
        Recipe(
            "smollm2-eagle", "smollm2", tokens=6_000_000, epochs=6, answer_tokens=96,
            written_share=0.75, batch=80,
        ),
        Recipe(
            "tiny-eagle", "tiny", tokens=24_576, epochs=6, answer_tokens=64, prompt_tokens=160,
            held_out=16, held_out_tokens=(32, 64), batch=16, learning_rate=2e-3,
        ),
    )
}  # fmt: skip


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises ConfigError for an unknown one."""
    if name not in RECIPES:
        raise ConfigError.unknown("drafter", name, RECIPES)
    return RECIPES[name]
