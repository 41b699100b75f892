"""Errors of K or V rows against reference rows, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PARTS = ("prompt", "output")
"""Rows of the prompt's tokens, and rows of the request's own output tokens."""


@dataclass(frozen=True)
class RowPlaces:
    """Where rows stand: request and position of each, and whether it is an output token's.

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
    """The same memory in the dtype of its elements."""
    if rows.dtype is not torch.uint8:
        return rows
    return rows.view(torch.float8_e5m2 if "e5m2" in cache_dtype else torch.float8_e4m3fn)


def errors_of(
    rows: Tensor, reference: Tensor, places: RowPlaces, cache_dtype: str
) -> list[dict[str, Any]]:
    """Errors of one layer's K or V rows, one dict for each part that has rows.

    The error of one head's row is its L2 distance to the reference over the root mean square
    norm of all reference rows: a wrong row is off by about 1 in any layer of any model, and one
    wrong head is not averaged away.

    Args:
        rows, reference: [rows, kv_heads, head_dim] in the cache's dtype, on one device.
        places: what each row is.
        cache_dtype: vLLM's kv_cache_dtype.

    Returns:
        Dicts of `part`, `rows` (heads counted apart), `largest`, `rms`, `median` (None: not
        finite), the place of the largest, `differing` rows (bit for bit) and the place of the
        first, `one_step` and `one_element`: the error of one rounding step of the largest
        element, and of an average one.
    """
    expected = cache_values(reference, cache_dtype)
    norm = expected.square().sum(-1).mean().sqrt()
    distance = (cache_values(rows, cache_dtype) - expected).square().sum(-1).sqrt()
    errors = torch.where(distance == 0, distance, distance / norm)
    errors = errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
    differing = (_bits(rows) != _bits(reference)).any(-1)
    step = torch.finfo(element_view(reference, cache_dtype).dtype).eps
    one_step = (step * expected.abs().max() / norm).nan_to_num(nan=0.0)
    one_element = step / expected.shape[-1] ** 0.5
    found = []
    for part, chosen in zip(PARTS, (~places.is_output, places.is_output), strict=True):
        index = chosen.nonzero(as_tuple=True)[0]
        if index.numel():
            there = index.to(errors.device)
            numbers = _numbers(errors[there], differing[there], one_step, places, index)
            found.append({"part": part, **numbers, "one_element": one_element})
    return found


def _numbers(
    errors: Tensor, differing: Tensor, one_step: Tensor, places: RowPlaces, index: Tensor
) -> dict[str, Any]:
    """All numbers in one copy to the host: there are a few for every layer."""
    heads = errors.shape[1]
    flat, wrong = errors.flatten(), differing.flatten().to(torch.uint8)
    measured = (flat.max(), flat.square().mean().sqrt(), flat.median(), one_step)
    found = (flat.argmax(), wrong.argmax(), wrong.sum())
    largest, rms, median, step, worst, first, count = torch.stack(
        [number.double() for number in (*measured, *found)]
    ).tolist()
    places_of = [int(worst), int(first)]
    at_worst, at_first = (_place(places, int(index[n // heads]), n % heads) for n in places_of)
    return {
        "rows": flat.numel(),
        "largest": _number(largest),
        "rms": _number(rms),
        "median": _number(median),
        "place": at_worst,
        "differing": int(count),
        "first": at_first if count else None,
        "one_step": _number(step),
    }


def _place(places: RowPlaces, row: int, head: int) -> dict[str, int]:
    request, position = int(places.requests[row]), int(places.positions[row])
    return {"request": request, "position": position, "head": head}


def _number(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _bits(rows: Tensor) -> Tensor:
    sizes: Sequence[torch.dtype] = (torch.uint8, torch.int16, torch.int32)
    return rows.view(sizes[rows.element_size().bit_length() - 1])
