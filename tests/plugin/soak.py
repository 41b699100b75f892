"""A server's life in pieces: requests come and go through a V2 hook, and nobody drains.

What is counted is the memory that the plugin's Python objects hold (tracemalloc).
"""

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

from v2_pieces import run_step

AT_ONCE = 8
WINDOWS_EACH = 2
READ_EVERY = 400
"""Steps between two readings of the counts, as a server's metrics ask for them."""


def serve(hook: Any, requests: int, report_every: int, reads: bool = True) -> Iterator[int]:
    """Serve requests, eight at a time; yields how many have ended, every now and then.

    Names are those of vLLM's API server, which are never used twice.

    Args:
        hook: from `v2_pieces.make_hook`.
        requests: how many come, a multiple of eight.
        report_every: requests between two yields.
        reads: somebody reads the counts now and then; False: metrics are off.
    """
    steps, ended, last = 0, 0, set[str]()
    while ended < requests:
        names = [f"chatcmpl-{ended + place:032x}-{place:08x}" for place in range(AT_ONCE)]
        for _ in range(WINDOWS_EACH):
            run_step(hook, names, last)
            last = set()
            steps += 1
            if reads and steps % READ_EVERY == 0:
                hook.late.resolve(None)
        last = set(names)
        ended += AT_ONCE
        if ended % report_every == 0:
            yield ended
    run_step(hook, [], last)  # vLLM's empty step when the last request has ended


def memory_curve(
    hook: Any, requests: int, report_every: int, reads: bool = True
) -> Iterator[tuple[int, int]]:
    """Requests ended, and the bytes that Python objects made since the start hold."""
    tracemalloc.start()
    try:
        for ended in serve(hook, requests, report_every, reads):
            gc.collect()
            yield ended, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
