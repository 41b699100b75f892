"""Errors of K or V rows against reference rows, layer by layer."""

from collections.abc import Mapping, Sequence
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
        Dicts of `part`, `rows` (each head counts), `largest`, `rms`, `median` (None: not
        finite), the place of the largest, `differing` rows (bit for bit) and the place of the
        first, `one_step` and `one_element`: the error of one rounding step of the largest
        element, and of an average one.
    """
    errors = RowErrors(places)
    errors.add({}, rows, reference, cache_dtype)
    return errors.read()


@dataclass(frozen=True)
class _LayerErrors:
    """Errors of one layer's K or V rows, on their device."""

    labels: dict[str, Any]
    """Further entries of its dicts: which layer, and K or V."""
    one_element: float
    """Error of one rounding step of an average element."""
    errors: Tensor
    """[rows, kv_heads] float32."""
    differing: Tensor
    """[rows, kv_heads] uint8: 1 if a row is not equal bit for bit."""
    one_step: Tensor
    """Error of one rounding step of the largest element."""


class RowErrors:
    """Errors of many layers' K and V rows: on the device until all are read in one copy.

    Args:
        places: what each row is, in every layer.
    """

    def __init__(self, places: RowPlaces):
        self._places = places
        self._layers: list[_LayerErrors] = []

    def add(
        self, labels: Mapping[str, Any], rows: Tensor, reference: Tensor, cache_dtype: str
    ) -> None:
        """Measure one layer's K or V rows as `errors_of` says; `labels` go into its dicts."""
        expected = cache_values(reference, cache_dtype)
        norm = expected.square().sum(-1).mean().sqrt()
        distance = (cache_values(rows, cache_dtype) - expected).square_().sum(-1).sqrt()
        errors = torch.where(distance == 0, distance, distance / norm)
        differing = (_bits(rows) != _bits(reference)).any(-1).to(torch.uint8)
        step = torch.finfo(element_view(reference, cache_dtype).dtype).eps
        one_step = step * expected.abs().max() / norm
        one_element = step / expected.shape[-1] ** 0.5
        self._layers.append(_LayerErrors(dict(labels), one_element, errors, differing, one_step))

    def read(self) -> list[dict[str, Any]]:
        """The dicts of all layers, in the order in which they were added."""
        alike: dict[int, list[int]] = {}
        for number, layer in enumerate(self._layers):
            alike.setdefault(layer.errors.shape[1], []).append(number)
        found: list[list[dict[str, Any]]] = [[] for _ in self._layers]
        chosen = (~self._places.is_output, self._places.is_output)
        for part, which in zip(PARTS, chosen, strict=True):
            index = which.nonzero(as_tuple=True)[0]
            for numbers in alike.values() if index.numel() else ():
                for number, entry in zip(numbers, self._part(part, index, numbers), strict=True):
                    found[number].append(entry)
        return [entry for entries in found for entry in entries]

    def _part(self, part: str, index: Tensor, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """One dict for each of these layers, which have the same number of heads."""
        layers = [self._layers[number] for number in numbers]
        there = index.to(layers[0].errors.device)
        errors = torch.stack([layer.errors for layer in layers])[:, there].flatten(1)
        differing = torch.stack([layer.differing for layer in layers])[:, there].flatten(1)
        steps = torch.stack([layer.one_step for layer in layers])
        measured = _numbers(errors, differing, steps).tolist()
        return [
            self._entry(layer, part, index, values)
            for layer, values in zip(layers, measured, strict=True)
        ]

    def _entry(
        self, layer: _LayerErrors, part: str, index: Tensor, numbers: Sequence[float]
    ) -> dict[str, Any]:
        largest, rms, median, one_step, worst, first, count = numbers
        heads = layer.errors.shape[1]
        at_worst, at_first = (
            _place(self._places, int(index[int(n) // heads]), int(n) % heads)
            for n in (worst, first)
        )
        return {
            **layer.labels,
            "part": part,
            "rows": index.numel() * heads,
            "largest": _number(largest),
            "rms": _number(rms),
            "median": _number(median),
            "place": at_worst,
            "differing": int(count),
            "first": at_first if count else None,
            "one_step": _number(one_step),
            "one_element": layer.one_element,
        }


def _numbers(errors: Tensor, differing: Tensor, one_step: Tensor) -> Tensor:
    """[layers, 7] float64, read by `_entry`, from [layers, rows], [layers, rows] and [layers]."""
    errors = errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest, worst = errors.max(1)
    rms, median = errors.square().mean(1).sqrt(), errors.median(1).values
    measured = (largest, rms, median, one_step.nan_to_num(nan=0.0))
    found = (worst, differing.argmax(1), differing.sum(1))
    return torch.stack([numbers.double() for numbers in (*measured, *found)], 1)


def _place(places: RowPlaces, row: int, head: int) -> dict[str, int]:
    request, position = int(places.requests[row]), int(places.positions[row])
    return {"request": request, "position": position, "head": head}


def _number(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _bits(rows: Tensor) -> Tensor:
    sizes: Sequence[torch.dtype] = (torch.uint8, torch.int16, torch.int32)
    return rows.view(sizes[rows.element_size().bit_length() - 1])
