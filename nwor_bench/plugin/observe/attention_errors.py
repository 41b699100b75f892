"""Errors of one layer's attention on its own inputs: ours, stock's, and a float64 reference.

`exact_attention` writes softmax attention out, one request at a time, for every kind of layer that
is staged. With its result it returns the derivative by the logarithm of the softmax scale: an
error along that direction is a wrong scale, however small beside rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = (
    "ours", "stock", "ours_largest", "stock_largest", "apart", "apart_row",
    "gain", "gain_error", "stock_gain", "scale", "scale_error", "stock_scale",
)  # fmt: skip
"""Columns of `head_errors`. Errors are distances of a head's rows, over the root mean square norm
of the head's rows: `ours` and `stock` to the reference (root mean square, and the largest), `apart`
between the two, over all rows, with the row of the largest. `gain` is our output's signed error
along the reference (0.01: 1 % too long), `scale` along the derivative by the logarithm of the
softmax scale (0.01: a scale 1 % too large), each with its standard error over rows, and stock's."""


@dataclass(frozen=True)
class AttentionFacts:
    """What attention of a layer computes besides softmax(q k) v."""

    scale: float
    softcap: float = 0.0
    sliding_window: int = -1
    """A query sees at most this many positions, its own included; -1: all."""
    chunk: int = -1
    """A query at position p sees nothing before p - p % chunk; -1: everything."""
    sinks: Tensor | None = None
    """[heads], a score that takes weight and gives no value."""
    alibi_slopes: Tensor | None = None
    """[heads], added as slope * (key position - query position)."""
    margin: float = 1.0
    """By what the local gate multiplies its limits for this kind of attention."""


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, facts: AttentionFacts, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a request's last rows, and its derivative by the logarithm of the scale.

    With w = softmax(s), o = w v and s = scale * q k: do / dlog(scale) = (w * (s - sum(w s))) v.
    A softcap c changes s to c tanh(s / c), whose derivative is s (1 - tanh(s / c)^2).

    Args:
        query: [rows, heads, head_dim] float64, of the request's last positions.
        key: [tokens, kv_heads, head_dim] float64.
        value: [tokens, kv_heads, value_dim] float64.
        facts: the layer's.
        seen: [rows, tokens] bool, positions that a sparse layer selected; None: all.

    Returns:
        Both [rows, heads, value_dim] float64.
    """
    rows, heads, _ = query.shape
    grouped = query.view(rows, key.shape[1], -1, query.shape[-1])
    scores = torch.einsum("qgrd,tgd->grqt", grouped, key).flatten(0, 1) * facts.scale
    slope = scores
    if facts.softcap:
        bent = torch.tanh(scores / facts.softcap)
        slope = scores * (1 - bent.square())
        scores = facts.softcap * bent
    token = torch.arange(key.shape[0], device=key.device)
    position = token[-rows:, None]
    if facts.alibi_slopes is not None:
        scores = scores + facts.alibi_slopes.double()[:, None, None] * (token - position)
    visible = token <= position
    if facts.sliding_window > 0:
        visible = visible & (token > position - facts.sliding_window)
    if facts.chunk > 0:
        visible = visible & (token >= position - position % facts.chunk)
    if seen is not None:
        visible = visible & seen
    scores = scores.masked_fill(~visible, float("-inf"))
    if facts.sinks is not None:
        sink = facts.sinks.double()[:, None, None].expand(heads, rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    moved = weights * (slope - (weights * slope).sum(-1, keepdim=True))
    groups = (key.shape[1], -1, rows, key.shape[0])
    output, derivative = (
        torch.einsum("grqt,tgd->qgrd", each.view(groups), value).flatten(1, 2)
        for each in (weights, moved)
    )
    return output, derivative


def head_errors(
    ours: Tensor, stock: Tensor, sample: Tensor, exact: Tensor, derivative: Tensor
) -> tuple[Tensor, Tensor]:
    """Errors by head, and the signed ones over all heads together.

    Args:
        ours, stock: [rows, heads, value_dim].
        sample: [sampled rows] int64, rows that the reference has.
        exact, derivative: [sampled rows, heads, value_dim] float64.

    Returns:
        [heads, 12] float64 with the columns of FIELDS, and [6] float64: the last six of all heads.
    """
    ours, stock = ours.double(), stock.double()
    norm = exact.square().sum(-1).mean(0).sqrt()
    apart, apart_row = ((ours - stock).square().sum(-1).sqrt() / norm).max(0)
    our_error, stock_error = ours[sample] - exact, stock[sample] - exact
    sizes = []
    for error in (our_error, stock_error):
        squares = error.square().sum(-1)
        sizes.append((squares.mean(0).sqrt() / norm, squares.max(0).values.sqrt() / norm))
    (our_rms, our_largest), (stock_rms, stock_largest) = sizes
    signed = [
        part
        for direction in (exact, derivative)
        for part in _signed(our_error, stock_error, direction)
    ]
    columns = [our_rms, stock_rms, our_largest, stock_largest, apart, apart_row.double(), *signed]
    pooled = [
        part
        for direction in (exact, derivative)
        for part in _signed(
            *(e.flatten(0, 1)[:, None] for e in (our_error, stock_error, direction))
        )
    ]
    return torch.stack(columns, 1), torch.cat(pooled)


def _signed(ours: Tensor, stock: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[heads] each: our error along a direction, its standard error over rows, and stock's.

    A regression through the origin over the elements of all rows; its residuals are summed by row,
    since elements of a row are not independent.
    """
    length = direction.square().sum(-1)
    total = length.sum(0)
    along = (ours * direction).sum(-1)
    estimate = along.sum(0) / total
    residual = along - estimate * length
    error = residual.square().sum(0).sqrt() / total
    return estimate, error, (stock * direction).sum((0, -1)) / total
