"""Commits that the device refused: read late, logged once, and the end of staging.

A commit is all or nothing, and decided on the device: a slot outside of the cache, or a layer that
staged another number of rows, and no row of the window is written in any layer. The host has
counted the window as committed by then. A run fails on it, because its drain reads the errors. A
server has no drain, so the flags are read with the late counts, and the worker stops staging.
"""

import logging
from collections.abc import Sequence

from torch import Tensor

from nwor_bench.records.fallback_reasons import Fault, fault_of
from nwor_kernels.metadata import error_names

logger = logging.getLogger("vllm.nwor_bench")

WHAT_IS_LOST = (
    "nwor: the device refused a commit (%s, in %d of %d layers). The accepted tokens of that "
    "window are not in the KV cache, though vLLM goes on as if they were. Answers since the last "
    "reading of the counts may be wrong, and so may later answers that hit these blocks in the "
    "prefix cache. Every window is written directly from now on. Restart the server, and report "
    "this: no request can cause it, only a fault of nwor-bench"
)


class DeviceRefusals:
    """Commits of one worker that were refused, and whether it still stages.

    Args:
        errors: [layers] int32 on the device; commits or their ERROR_* flags in.
    """

    def __init__(self, errors: Tensor):
        self.errors = errors
        self.reason: str | None = None
        """The fallback reason of the first refusal; it is kept for as long as the worker runs."""
        self.stopped = False
        """True from the window on with which all ranks stopped staging."""
        self._unread: dict[str, None] = {}

    def note(self, flags: Sequence[int]) -> None:
        """Take the flags as they were read, [layers]."""
        if not any(flags):
            return
        self.errors.zero_()  # in the stream's order: behind every commit that was read
        together = 0
        for layer, flag in enumerate(flags):
            together |= flag
            if flag:
                self._unread[f"layer {layer}: {error_names(flag)}"] = None
        if self.reason is None:
            self.reason = f"{Fault.DEVICE_REFUSED}:{error_names(together)}"
            layers = sum(1 for flag in flags if flag)
            logger.error(WHAT_IS_LOST, error_names(together), layers, len(flags))

    def take(self) -> list[str]:
        """Refusals since the last call, for a run's drain; waits for the device."""
        self.note(self.errors.tolist())
        unread, self._unread = list(self._unread), {}
        return unread

    def to_vote(self) -> str | None:
        """This rank's vote on a staged window; None: nothing was refused."""
        return None if self.stopped else self.reason

    def settle(self, reason: str | None) -> None:
        """Take the ranks' common reason for a window; a refusal in it stops staging."""
        if reason is None or fault_of(reason) is not Fault.DEVICE_REFUSED or self.stopped:
            return
        self.stopped = True
        if self.reason is None:
            logger.error("nwor: no window is staged from now on: %s", reason)
