"""Training recipes: one per head. Pure."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from nwor_bench.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, apart from the machine.

    Attributes:
        pair: pair whose target the head drafts for; the target's weights do not change.
        tokens: answer tokens to train on, over all sequences.
        answer_tokens: length of each answer; generation ignores the end-of-text token.
        prompt_tokens: longest prompt used, for training and held-out prompts.
        written_share: share of training prompts that the target writes; the rest come from
            templates.
        around_share: share of the target's messages that become the text of a task (summarise,
            translate, search); the rest are prompts as they are.
        written_tokens: most tokens in a message that the target writes.
        held_out: number of scenario prompts on which acceptance is measured.
        held_out_tokens: answer lengths over which acceptance is measured.
        sampled_share: share of training answers sampled at `temperature`; the rest are greedy.
        batch: sequences per step.
        draft_tokens: drafts per window, in training and in the acceptance measurement.
        learning_rate: AdamW's highest learning rate.
        hidden_weight: weight of the smooth-L1 loss; the cross-entropy has weight 1.
        step_decay: weight of each further draft's loss, relative to the previous draft's.
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
            if value >= 2**32:
                raise ConfigError.for_field(f"--{name}", value, f"write {2**32 - 1} or less")

    @property
    def sequences(self) -> int:
        """Training sequences, one answer each."""
        return self.tokens // self.answer_tokens

    @property
    def self_written(self) -> int:
        """Training prompts that the target writes."""
        return round(self.sequences * self.written_share)

    @property
    def from_templates(self) -> int:
        """Training prompts from templates."""
        return self.sequences - self.self_written

    @property
    def sampled_sequences(self) -> int:
        """Training sequences with sampled answers."""
        return int(self.sequences * self.sampled_share)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps per epoch; the last may have fewer sequences."""
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
        """Read what `to_dict` gave. Raises KeyError for a missing value."""
        values = {field.name: stored[field.name] for field in fields(cls)}
        return cls(**values | {"held_out_tokens": tuple(values["held_out_tokens"])})


RECIPES = {
    recipe.name: recipe
    for recipe in (
        # Answers of 96 tokens put a third of the loss on the first 32, the number that the
        # scenario `short` generates. 62,500 answers; the target wrote 46,875 of the prompts.
        # 782 steps per epoch with 80 sequences each: 7,680 answer tokens, about 13,000 with
        # prompts. On one H200: 474 s for 4,692 steps (6 epochs), 144 s for the answers, 178 s for
        # the messages (80 % were usable).
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
