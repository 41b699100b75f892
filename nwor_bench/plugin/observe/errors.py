"""Errors of K or V rows against reference rows, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_kernels.attention_step import ScoreRules

PARTS = ("prompt", "output")
"""Rows of the prompt's tokens, and rows of the request's own output tokens."""


@dataclass(frozen=True)
class RowPlaces:
    """Places of rows: request and position of each, and whether it is an output token's.

    All are [rows] on the host: int64, int64 and bool.
    """

    requests: Tensor
    positions: Tensor
    is_output: Tensor


def cache_values(rows: Tensor, cache_dtype: str) -> Tensor:
    """Cached elements as float32; an fp8 cache's without its scale, which is one a layer.

    Args:
        rows: any shape, in the cache's dtype; vLLM keeps fp8 as bytes.
        cache_dtype: vLLM's kv_cache_dtype, for the kind of fp8.
    """
    return element_view(rows, cache_dtype).float()


def element_view(rows: Tensor, cache_dtype: str) -> Tensor:
    """The rows' memory in the dtype of its elements."""
    if rows.dtype is not torch.uint8:
        return rows
    return rows.view(torch.float8_e5m2 if "e5m2" in cache_dtype else torch.float8_e4m3fn)


class RowErrors:
    """Errors of many layers' K and V rows: on the device until all are read in one copy.

    The error of one head's row is its L2 distance to the reference over the root mean square
    norm of all reference rows: a wrong row is off by about 1 in any layer of any model, and one
    wrong head is not averaged away.
    """

    def __init__(self, places: RowPlaces):
        self._places = places
        self._rows_of = [
            which.nonzero(as_tuple=True)[0] for which in (~places.is_output, places.is_output)
        ]
        # Of states, which have one row a request, a router's choice is told from a fault by rows.
        self._keeps_each = len(set(places.requests.tolist())) == places.requests.numel()
        self._labels: list[dict[str, Any]] = []
        self._measured: list[Tensor] = []

    def add(
        self, labels: Mapping[str, Any], rows: Tensor, reference: Tensor, cache_dtype: str
    ) -> None:
        """Measure one layer's K or V rows.

        Args:
            labels: further entries of its dicts.
            rows, reference: [rows, kv_heads, head_dim] in the cache's dtype, on one device.
        """
        expected = cache_values(reference, cache_dtype)
        norm = expected.square().sum(-1).mean().sqrt()
        distance = (cache_values(rows, cache_dtype) - expected).square_().sum(-1).sqrt()
        errors = torch.where(distance == 0, distance, distance / norm)
        differing = (bits_of(rows) != bits_of(reference)).any(-1).to(torch.uint8)
        step = torch.finfo(element_view(reference, cache_dtype).dtype).eps
        one_step = step * expected.abs().max() / norm
        one_element = step / expected.shape[-1] ** 0.5
        for part, index in zip(PARTS, self._rows_of, strict=True):
            if index.numel():
                facts = {"part": part, "one_element": one_element, "heads": errors.shape[1]}
                there = index.to(errors.device)
                if self._keeps_each:
                    facts["each"] = errors[there].nan_to_num(nan=torch.inf)
                self._labels.append({**labels, **facts})
                self._measured.append(_numbers(errors[there], differing[there], one_step))

    def read(self) -> list[dict[str, Any]]:
        """The dicts of all layers in the order of `add`, one for each part that has rows.

        They hold `part`, `rows` (each head counts), `largest`, `rms`, `median` (None: not finite),
        the place of the largest, `differing` rows (bit for bit) and the place of the first,
        `one_step` and `one_element`: the error of one rounding step of the largest element, and of
        an average one. If each row is of another request, also `each`: [rows][heads] errors.
        """
        numbers = torch.stack(self._measured).tolist() if self._measured else []
        return [self._entry(*entry) for entry in zip(self._labels, numbers, strict=True)]

    def _entry(self, labels: dict[str, Any], numbers: Sequence[float]) -> dict[str, Any]:
        largest, rms, median, one_step, worst, first, count = numbers
        index, heads = self._rows_of[PARTS.index(labels["part"])], labels["heads"]
        at_worst, at_first = (
            _place(self._places, int(index[int(n) // heads]), int(n) % heads)
            for n in (worst, first)
        )
        of_requests = {"each": labels["each"].tolist()} if self._keeps_each else {}
        return {
            **{name: value for name, value in labels.items() if name != "heads"},
            **of_requests,
            "rows": index.numel() * heads,
            "largest": _number(largest),
            "rms": _number(rms),
            "median": _number(median),
            "place": at_worst,
            "differing": int(count),
            "first": at_first if count else None,
            "one_step": _number(one_step),
        }


def _numbers(errors: Tensor, differing: Tensor, one_step: Tensor) -> Tensor:
    """[7] float64 for `_entry`, from [rows, kv_heads] twice and one number; stays on the device."""
    errors = errors.flatten().nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest, worst = errors.max(0)
    measured = (largest, errors.square().mean().sqrt(), errors.median())
    facts = (one_step.nan_to_num(nan=0.0), worst, differing.flatten().argmax(), differing.sum())
    return torch.stack([number.double() for number in (*measured, *facts)])


def _place(places: RowPlaces, row: int, head: int) -> dict[str, int]:
    request, position = int(places.requests[row]), int(places.positions[row])
    return {"request": request, "position": position, "head": head}


def _number(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def bits_of(rows: Tensor) -> Tensor:
    """The rows' memory as integers: bytes that are NaN compare, too."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return rows.view(sizes[rows.element_size()])


FIELDS = (
    "ours", "stock", "ours_largest", "stock_largest", "apart", "apart_row",
    "gain", "gain_error", "stock_gain", "scale", "scale_error", "stock_scale",
)  # fmt: skip
"""Columns of `head_errors`. Errors are distances of a head's rows, over the root mean square norm
of the head's rows: `ours` and `stock` to the reference (root mean square, and the largest; ours to
`merged_attention` if a window's rows were merged into stock's output), `apart` between the two,
over all rows, with the row of the largest. `gain` is our output's signed error along the reference
(0.01: 1 % too long), `scale` along the derivative by the logarithm of the softmax scale (0.01: a
scale 1 % too large), each with its standard error over rows, and stock's."""


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, facts: ScoreRules
) -> tuple[Tensor, Tensor]:
    """Attention of a request's last rows, and its derivative by the logarithm of the scale.

    With w = softmax(s), o = w v and s = scale * q k: do / dlog(scale) = (w * (s - sum(w s))) v.
    A softcap c changes s to c tanh(s / c), whose derivative is s (1 - tanh(s / c)^2).

    Args:
        query: [rows, heads, head_dim] float64, of the request's last positions.
        key: [tokens, kv_heads, head_dim] float64.
        value: [tokens, kv_heads, value_dim] float64.

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
    visible = token <= position
    if facts.sliding_window > 0:
        visible = visible & (token > position - facts.sliding_window)
    if facts.chunk > 0:
        visible = visible & (token >= position - position % facts.chunk)
    scores = scores.masked_fill(~visible, float("-inf"))
    if facts.sinks is not None:
        sink = facts.sinks.double()[:, None, None].expand(heads, rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    moved = weights * (slope - (weights * slope).sum(-1, keepdim=True))
    groups = (key.shape[1], -1, rows, key.shape[0])
    output, derivative = (
        torch.einsum("grqt,tgd->qgrd", part.view(groups), value).flatten(1, 2)
        for part in (weights, moved)
    )
    return output, derivative


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dtype: torch.dtype,
    *,
    causal: bool = True,
) -> Tensor:
    """Attention over the committed tokens, rounded, with a window's rows merged in, rounded again.

    Two roundings have a bias that one does not have: if the window's rows take little weight,
    the merge moves an element by less than half a step, and rounding puts it back. On an H200 this
    lengthened the output of a DeepSeek-V2-Lite shape by 0.02 %, in our kernel as in this function.

    Args:
        query: [rows, heads, width] float64, of the request's last positions, all of them staged.
        key, value: [tokens, kv_heads, width] and [tokens, kv_heads, value_dim] float64.
        dtype: of the output, to which both are rounded.
        causal: stock's mask is causal and ends with the committed tokens; else it has none.

    Returns:
        [rows, heads, value_dim] float64.
    """
    rows, tokens = query.shape[0], key.shape[0]
    token = torch.arange(tokens, device=key.device)
    position = token[-rows:, None]
    visible = token <= position
    by_stock = token <= position - rows if causal else (token < tokens - rows).expand_as(visible)
    ratio = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(ratio, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,thd->hqt", query, key) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    stocks = weights * by_stock
    share = stocks.sum(-1, keepdim=True)
    first, rest = (torch.einsum("hqt,thd->hqd", part, value) for part in (stocks, weights - stocks))
    committed = (first / share.clamp_min(1e-300)).to(dtype).double()
    return (share * committed + rest).to(dtype).double().transpose(0, 1)


def head_errors(
    ours: Tensor,
    stock: Tensor,
    sample: Tensor,
    exact: Tensor,
    derivative: Tensor,
    expected: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Errors by head, and the signed ones over all heads together.

    Args:
        ours, stock: [rows, heads, value_dim].
        sample: [sampled rows] int64, rows that the reference has.
        exact, derivative: [sampled rows, heads, value_dim] float64.
        expected: likewise, the reference of ours if it is not `exact`.

    Returns:
        [heads, 12] float64 with the columns of FIELDS, and [6] float64: the last six of all heads.
    """
    ours, stock = ours.double(), stock.double()
    norm = exact.square().sum(-1).mean(0).sqrt()
    apart, apart_row = ((ours - stock).square().sum(-1).sqrt() / norm).max(0)
    our_error = ours[sample] - (exact if expected is None else expected)
    stock_error = stock[sample] - exact
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
    """[heads] each: our error along a direction, its standard error over rows, and stock's error.

    A regression through the origin over the elements of all rows; its residuals are summed by row,
    since elements of a row are not independent. The standard error is the larger of ours and
    stock's: against a reference with our own roundings, ours would be too small.
    """
    length = direction.square().sum(-1)
    total = length.sum(0)
    estimates, errors = [], []
    for output in (ours, stock):
        along = (output * direction).sum(-1)
        estimates.append(along.sum(0) / total)
        residual = along - estimates[-1] * length
        errors.append(residual.square().sum(0).sqrt() / total)
    return estimates[0], torch.maximum(*errors), estimates[1]


def place_for(size: int, device: torch.device, times: int) -> torch.device:
    """Where to keep copies: the host, unless a GPU has so many times their size free."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < times * size:
        return torch.device("cpu")
    return device
