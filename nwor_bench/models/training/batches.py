"""Which sequences a training step takes, and how they lie in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from nwor_bench.models.training.data import Sequenced
from nwor_bench.models.training.recipe import Recipe

SORTED_TOGETHER = 16
"""Batches whose sequences are sorted by length among themselves, so that little is padded."""


@dataclass(frozen=True)
class Batch:
    """Sequences of one step, padded at the right.

    Attributes:
        ids: token ids, [batch, tokens].
        begins: [batch], index of the first token of each answer.
        ends: [batch], length of each sequence.
    """

    ids: Tensor
    begins: Tensor
    ends: Tensor


class Batches:
    """The batches of a training; what a step takes follows from the seed and the step alone."""

    def __init__(self, recipe: Recipe, training: Sequence[Sequenced], device: str):
        self._recipe, self._training, self._device = recipe, training, device
        self._lengths = [len(prompt) + len(answer) for prompt, answer in training]
        # An order is made once an epoch: shuffling ten thousands takes longer than their step.
        self._order = lru_cache(maxsize=1)(self._shuffled)

    def batch(self, step: int) -> Batch:
        """The batch of that optimiser step."""
        epoch, index = divmod(step, self._recipe.steps_per_epoch)
        chosen = [self._training[i] for i in self._order(epoch)[index]]
        rows = [torch.tensor(prompt + answer) for prompt, answer in chosen]
        return Batch(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device),
            torch.tensor([len(prompt) for prompt, _ in chosen], device=self._device),
            torch.tensor([len(row) for row in rows], device=self._device),
        )

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """Indices of each batch: every sequence once, those of like length rather together."""
        random = Random(f"order:{self._recipe.seed}:{epoch}")
        order, size = list(range(len(self._training))), self._recipe.batch
        random.shuffle(order)
        for begin in range(0, len(order), SORTED_TOGETHER * size):
            part = slice(begin, begin + SORTED_TOGETHER * size)
            order[part] = sorted(order[part], key=self._lengths.__getitem__)
        batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
        random.shuffle(batches)
        return batches
