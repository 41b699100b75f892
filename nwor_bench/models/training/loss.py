"""What training makes smaller: how far drafts are from the target's own next step."""

import torch
from torch import Tensor
from torch.nn import functional as F

from nwor_bench.models.training.batches import Batch
from nwor_bench.models.training.model import EagleHead, unroll
from nwor_bench.models.training.recipe import Recipe
from nwor_bench.models.training.target import Target


def draft_losses(
    recipe: Recipe, head: EagleHead, target: Target, batch: Batch
) -> dict[str, Tensor]:
    """Losses of one batch: `loss`, and its parts `cross_entropy` and `smooth_l1`, scalars.

    Cross-entropy is between the target's and the head's next-token distributions, smooth-L1
    between the hidden states, as in EAGLE; each is a mean over the windows that could begin in
    an answer, and a weighted mean over the drafts of a window.
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
        # With probabilities as its second argument: the whole distribution, not one token.
        wanted = F.cross_entropy(target.logits(draft[chosen]), likely[chosen[answered]])
        entropy = entropy + share * wanted
        near = F.smooth_l1_loss(draft[chosen].float(), ahead[chosen].float())
        distance = distance + share * near
    loss = entropy + recipe.hidden_weight * distance
    return {"loss": loss, "cross_entropy": entropy, "smooth_l1": distance}
