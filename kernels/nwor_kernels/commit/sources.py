"""Where a commit reads: every layer's K and V rows, as a table of addresses on the device."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
"""Dtypes of K and V that a commit reads, in Triton's words."""


class StagedSources:
    """Addresses of every layer's K and V rows on the device, for `CommitPlan.commit_windows`.

    It holds addresses, not tensors: keep the tensors alive for as long as it is used. Building
    it copies the table to the device and waits for that: do it outside any capture.

    Args:
        keys: one tensor a layer, [rows, kv_heads, head_dim]; strides, dtype and shape the same
            in all layers.
        values: likewise, [rows, kv_heads, value_head_dim], of the dtype of the keys.

    Raises:
        ValueError: tensors that one launch cannot serve.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]):
        for name, tensors in (("keys", keys), ("values", values)):
            layouts = {(t.dtype, t.device, t.stride(), t.shape) for t in tensors}
            if len(layouts) != 1:
                raise ValueError(
                    f"{name} of all layers must share dtype, device, strides and shape: {layouts}"
                )
        known_element(keys[0].dtype, FLOATS, "keys")
        if len(keys) != len(values) or keys[0].dtype != values[0].dtype:
            raise ValueError(
                f"{len(keys)} keys of {keys[0].dtype} and {len(values)} values of "
                f"{values[0].dtype}: one of each a layer, of one dtype"
            )
        if keys[0].shape[:2] != values[0].shape[:2]:
            raise ValueError(
                f"keys are {tuple(keys[0].shape)} and values {tuple(values[0].shape)}: rows and "
                "heads must be the same"
            )
        self.num_layers = len(keys)
        self.dtype = keys[0].dtype
        _, self.kv_heads, self.key_dim = keys[0].shape
        self.value_dim = values[0].shape[2]
        self._addresses = self._take(keys, values)
        self.table = torch.tensor(self._addresses, dtype=torch.int64, device=keys[0].device)

    def refill(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Point at other tensors, in the same table, by a copy that waits for nothing.

        For eager mode, where addresses may change with every step; while they do not, nothing is
        copied. Rows and strides may change too, but a launch that was captured keeps the old
        ones. Only the first layer's layout is looked at (host time counts here): the caller lays
        out all layers alike.

        Raises:
            ValueError: other layers, heads, head dims or dtype than this was built for.
        """
        kept = (self.num_layers, self.num_layers, self.dtype, self.kv_heads)
        given = (len(keys), len(values), keys[0].dtype, keys[0].shape[1])
        dims = (keys[0].shape[2], values[0].shape[2])
        if given != kept or dims != (self.key_dim, self.value_dim):
            raise ValueError(
                f"{len(keys)} keys {tuple(keys[0].shape)} {keys[0].dtype} and {len(values)} values "
                f"{tuple(values[0].shape)} cannot take the place of {self.num_layers} layers of "
                f"{self.kv_heads} heads of {self.key_dim} and {self.value_dim} in {self.dtype}"
            )
        addresses = self._take(keys, values)
        if addresses == self._addresses:
            return
        self._addresses = addresses
        # PyTorch's pinned memory is not handed out again before this copy is through.
        on_host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.table.is_cuda)
        self.table.copy_(on_host, non_blocking=True)

    def _take(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Remember the layout of the first layer; the addresses of all."""
        self.num_rows = min(keys[0].shape[0], values[0].shape[0])
        self.key_strides = keys[0].stride()
        self.value_strides = values[0].stride()
        addresses = [
            (key.data_ptr(), value.data_ptr()) for key, value in zip(keys, values, strict=True)
        ]
        self.alignment = alignment_of(address for pair in addresses for address in pair)
        self.layout = (
            (self.num_layers, self.kv_heads, self.dtype),
            (self.key_dim, *self.key_strides),
            (self.value_dim, *self.value_strides),
            self.alignment,
        )
        return addresses


def known_element(dtype: torch.dtype, known: Mapping[torch.dtype, Any], name: str) -> Any:
    """Triton's name of a dtype; the ValueError lists the known dtypes."""
    if dtype not in known:
        raise ValueError(f"{name} are {dtype}; commit knows {', '.join(map(str, known))}")
    return known[dtype]


def alignment_of(addresses: Iterable[int]) -> int:
    """Bytes that all addresses are known to be multiples of, for wide loads and stores."""
    return 16 if all(address % 16 == 0 for address in addresses) else 1
