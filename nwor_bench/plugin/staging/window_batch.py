"""The draft tokens of a window, and where their K/V go."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class WindowBatch:
    """The draft tokens of one step, and where their K/V go."""

    num_draft_tokens: tuple[int, ...]
    """Drafts of each request in batch order; 0 for a request that only prefills."""
    rows: Tensor
    """[N] int64, the staged tokens' rows in the batch."""
    slots: Tensor
    """Their cache slots, int64: one a token in each KV-cache group, the same for every layer of the
    group. [N] where the target layers lie in one group, else [groups, N] (`SlotRows`)."""
    direct_slots: Tensor | None
    """[num_tokens] or [groups, num_tokens] int64, the slots to be written at once: the step's, with
    -1 for staged tokens. None: the whole step waits for the commit."""

    @cached_property
    def total(self) -> int:
        """Draft tokens of the window."""
        return sum(self.num_draft_tokens)

    @cached_property
    def direct_slots_of(self) -> tuple[Tensor, ...]:
        """`direct_slots` of each KV-cache group, [num_tokens]; they must not be None."""
        slots = self.direct_slots
        assert slots is not None
        return (slots,) if slots.dim() == 1 else slots.unbind()

    def fits(self, accepted: Tensor) -> bool:
        """True if this acceptance has the shape of this window's: a mask of its staged rows."""
        return accepted.shape == self.rows.shape
