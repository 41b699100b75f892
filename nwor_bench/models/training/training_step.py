"""One training step: its batch of sequences, and the loss over the drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from nwor_bench.models.training.data import Sequenced
from nwor_bench.models.training.eagle_head import EagleHead, unroll
from nwor_bench.models.training.recipe import Recipe
from nwor_bench.models.training.target import Target

SORTED_TOGETHER = 16
"""Number of batches whose sequences are sorted by length together, to reduce padding."""


@dataclass(frozen=True)
class Batch:
    """Sequences of one step, padded on the right.

    Attributes:
        ids: token ids, [batch, tokens].
        begins: [batch], index of the first token of each answer.
        ends: [batch], length of each sequence.
    """

    ids: Tensor
    begins: Tensor
    ends: Tensor


class Batches:
    """The batches of a training; seed and step number alone decide a step's batch."""

    def __init__(self, recipe: Recipe, training: Sequence[Sequenced], device: str):
        self._recipe, self._training, self._device = recipe, training, device
        self._lengths = [len(prompt) + len(answer) for prompt, answer in training]
        # One order per epoch: shuffling tens of thousands of indices takes longer than a step.
        self._order = lru_cache(maxsize=1)(self._shuffled)

    def batch(self, step: int) -> Batch:
        """The batch of an optimiser step."""
        epoch, index = divmod(step, self._recipe.steps_per_epoch)
        chosen = [self._training[i] for i in self._order(epoch)[index]]
        rows = [torch.tensor(prompt + answer) for prompt, answer in chosen]
        return Batch(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device),
            torch.tensor([len(prompt) for prompt, _ in chosen], device=self._device),
            torch.tensor([len(row) for row in rows], device=self._device),
        )

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """Indices of each batch: every sequence once, mostly with others of similar length."""
        random = Random(f"order:{self._recipe.seed}:{epoch}")
        order, size = list(range(len(self._training))), self._recipe.batch
        random.shuffle(order)
        for begin in range(0, len(order), SORTED_TOGETHER * size):
            part = slice(begin, begin + SORTED_TOGETHER * size)
            order[part] = sorted(order[part], key=self._lengths.__getitem__)
        batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
        random.shuffle(batches)
        return batches


def draft_losses(
    recipe: Recipe, head: EagleHead, target: Target, batch: Batch
) -> dict[str, Tensor]:
    """Losses of one batch: `loss`, and its parts `cross_entropy` and `smooth_l1`, scalars.

    As in EAGLE: cross-entropy between the target's and the head's next-token distributions, and
    smooth-L1 between their hidden states. Each is a mean over all possible windows in the answers,
    and a weighted mean over a window's drafts.
    """
    hidden, embeds = target.hidden_states(batch.ids), target.embed(batch.ids)
    drafted = unroll(head, embeds, hidden, recipe.draft_tokens)
    ahead = hidden[:, 1:]
    at = torch.arange(ahead.shape[1], device=batch.ids.device)[None]
    answered = (at >= batch.begins[:, None] - 1) & (at + 2 < batch.ends[:, None])
    likely = target.logits(ahead[answered]).softmax(-1)
    weights = [recipe.step_decay**j for j in range(recipe.draft_tokens)]
    entropy = distance = torch.zeros((), device=batch.ids.device)
    for j, (draft, weight) in enumerate(zip(drafted, weights, strict=True)):
        chosen = answered & (at - j >= batch.begins[:, None] - 1)
        share = weight / sum(weights)
        # The second argument holds probabilities: the target's whole distribution.
        wanted = F.cross_entropy(target.logits(draft[chosen]), likely[chosen[answered]])
        entropy = entropy + share * wanted
        near = F.smooth_l1_loss(draft[chosen].float(), ahead[chosen].float())
        distance = distance + share * near
    loss = entropy + recipe.hidden_weight * distance
    return {"loss": loss, "cross_entropy": entropy, "smooth_l1": distance}
