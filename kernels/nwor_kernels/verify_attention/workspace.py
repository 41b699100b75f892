"""Scratch memory of a launch of the verification kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_kernels.verify_attention.discard import LINE_BYTES
from nwor_kernels.verify_attention.tuning import (
    Discard,
    LaunchShape,
    padded,
    programs_for,
    row_tiling,
)


@dataclass(frozen=True)
class VerifyWorkspace:
    """Partial results of contexts that several programs share, and which programs are done.

    Made once and used by every layer; launches that share one must not overlap.
    """

    accumulators: Tensor
    """float32, two [rows, out_dim] tiles a program: only the first and the last of its contexts can
    be shared with another program."""
    sums: Tensor
    """float32, maximum and sum of each of their rows."""
    arrived: Tensor
    """int32, programs done with each (request, K/V head, tile of query rows); every launch leaves
    it at 0."""

    @classmethod
    def create(
        cls,
        *,
        max_requests: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_query_len: int,
        device: torch.device,
        programs: int | None = None,
        value_dim: int | None = None,
    ) -> "VerifyWorkspace":
        """Room for any launch of up to `max_requests` requests; `programs` as in `Tuning`.

        `value_dim` None: values are as wide as keys.
        """
        value_dim = value_dim or head_dim
        widest = max(head_dim, value_dim)
        rows, row_tiles, dim = row_tiling(max_query_len, num_heads // num_kv_heads, widest)
        tiles = 2 * (programs or programs_for(rows, dim, device))
        pairs = max_requests * num_kv_heads * row_tiles
        return cls.allocate(tiles * rows, padded(value_dim), pairs, device)

    @classmethod
    def allocate(
        cls, rows: int, dim: int, counters: int, device: torch.device
    ) -> "VerifyWorkspace":
        """Room for so many rows of partial results, and for so many (request, head, tile)s."""
        return cls(
            torch.empty(rows * dim, dtype=torch.float32, device=device),
            torch.empty(rows * 2, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )

    def check(self, shape: LaunchShape, pairs: int) -> None:
        """Raise ValueError if a launch of this shape does not fit, or may not discard here."""
        needed = 2 * shape.programs * shape.rows * shape.out_dim
        if self.accumulators.numel() < needed or self.arrived.numel() < pairs:
            raise ValueError(
                f"the workspace is too small: {self.accumulators.numel()} numbers and "
                f"{self.arrived.numel()} counters for {needed} and {pairs}"
            )
        if shape.discard is Discard.L2:
            for name, tensor in (("accumulators", self.accumulators), ("sums", self.sums)):
                if tensor.data_ptr() % LINE_BYTES:
                    raise ValueError(
                        f"the workspace's {name} begin at {tensor.data_ptr():#x}, no multiple of "
                        f"{LINE_BYTES}: what shares a cache line with them would be discarded too"
                    )
