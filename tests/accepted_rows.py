"""Which rows of a commit are accepted, from the requests' counts: the definition, in torch."""

import torch
from torch import Tensor


def accepted_rows(
    num_sampled: Tensor,
    num_rows: int,
    *,
    certain: int = 0,
    tokens_per_request: int | None = None,
    row_request: Tensor | None = None,
    row_index: Tensor | None = None,
) -> Tensor:
    """[num_rows] bool: which rows of a launch are below their request's count.

    Row i is number `row_index[i]` of the window of request `row_request[i]`, or number
    `i % tokens_per_request` of request `i // tokens_per_request`, and is accepted when that
    number is below `num_sampled[request] + certain`. A request that is negative or has no count
    (padding of a captured shape) has no accepted rows.
    """
    if tokens_per_request is not None:
        row = torch.arange(num_rows, device=num_sampled.device)
        request, index = row // tokens_per_request, row % tokens_per_request
    else:
        assert row_request is not None
        assert row_index is not None
        request, index = row_request, row_index
    known = (request >= 0) & (request < num_sampled.numel())
    if not num_sampled.numel():
        return known
    count = num_sampled[request.long().clamp(0, num_sampled.numel() - 1)]
    return known & (index < count + certain)
