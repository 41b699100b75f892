"""What vLLM's V1 runner needs of a device to run with async scheduling on a CPU.

It copies results on streams of their own. On a CPU every copy is done when it returns, so streams
and events have nothing to do; vLLM's own stand-ins last only while its runner is built.
"""

from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import parent_process
from typing import Any

import torch

from nwor_bench.plugin.worker import NworWorkerExtension


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, *_: Any) -> None:
        """Nothing runs later than this."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """The one order in which everything happens."""

    device = torch.device("cpu")

    def wait_stream(self, _: Any) -> None:
        """Nothing to wait for."""


def stand_in_for_streams(put: Callable[[Any, str, Any], None]) -> None:
    """Replace PyTorch's streams and events by these; `put` is setattr, or a monkeypatch's."""
    put(torch, "Event", Event)
    put(torch.cuda, "Event", Event)
    put(torch.cuda, "Stream", Stream)
    put(torch.cuda, "current_stream", lambda *_: Stream())
    put(torch.cuda, "stream", lambda _: nullcontext())


class AsyncWorkerExtension(NworWorkerExtension):
    """Names this module to vLLM, so that a worker's own process imports it."""


if parent_process() is not None:
    stand_in_for_streams(setattr)
