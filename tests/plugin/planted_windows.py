"""Windows of servers with planted effects, and what a worker's metrics show of them."""

import random
from collections.abc import Iterator
from itertools import groupby, islice
from math import exp
from pathlib import Path
from typing import Any

from live_windows import verified
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_order import (
    SERVER_DRAFT_RUN_LENGTHS,
    SERVER_RUN_LENGTHS,
    SERVER_SEED,
    WindowPlace,
    places_of,
)

DRAFTS = 2
"""Largest draft count of a server in which draft counts alternate."""

ACCEPTED = {0: 0.0, 1: 0.8, 2: 0.7}
"""Chance that a draft is accepted if those before it were, by draft count."""

Placed = tuple[WindowRecord, WindowPlace | None]


def windows_of_modes() -> Iterator[Placed]:
    """400 groups of off and stage: 1 request gains nothing, 4 gain 3 %, 8 gain 10 %. Some are cut
    by a prefill, have a window that fell back, or one without a time."""
    draw = random.Random("modes")
    places = places_of([(0, 1)] * 4 + [(0, 2)], SERVER_SEED, SERVER_RUN_LENGTHS)
    for number in range(400):
        requests = draw.choices([1, 4, 8], [2, 5, 5])[0]
        gain = {1: 0.0, 4: 0.03, 8: 0.1}[requests]
        spoiled = {3: "cut", 5: "fell back", 7: "untimed", 9: "size"}.get(number % 40)
        for at, place in enumerate(islice(places, 8)):
            if spoiled == "cut" and at > 4:
                yield verified(4, requests), None
                continue
            ms = (8 + requests / 10) * exp(draw.gauss(-gain * (place.cell == 1), 0.01))
            more: dict[str, Any] = {"wall_ms": ms, "device_ms": ms * 0.98}
            if at == 3 and spoiled == "untimed":
                more = {}
            if at == 5 and spoiled == "fell back":
                more["fallback_reason"] = "kv_transfer"
            size = 2 * requests + 1 if at == 7 and spoiled == "size" else requests
            yield verified(4, size, **more), place


def windows_of_drafts() -> Iterator[Placed]:
    """300 groups of k = 0 and another k at 1 and 12 requests, with a span of windows at one k in
    front of each."""
    draw = random.Random("drafts")
    pairs = [(0, 1), (0, 2), (0, 3)]
    every = places_of(pairs, SERVER_SEED, SERVER_DRAFT_RUN_LENGTHS)
    for number, group in islice(groupby(every, key=lambda place: place.group), 300):
        requests = (1, 12)[number % 2]
        for _ in range(12):
            yield drafted(draw, 1 + number % DRAFTS, requests), None
        for at, place in enumerate(list(group)):
            k = place.cell % (DRAFTS + 1)
            costs = {1: 0.1, 12: 0.6}[requests] * k
            ms = 10 * exp(draw.gauss(costs, 0.01))
            given = k + 1 if (number % 30, at) == (4, 4) else k
            yield drafted(draw, given, requests, wall_ms=ms), place


def drafted(draw: random.Random, k: int, requests: int, **more: Any) -> WindowRecord:
    """A window of k drafts a request, accepted by chance."""
    accepted = 0
    for _ in range(requests):
        for _ in range(k):
            if draw.random() > ACCEPTED.get(k, 0.5):
                break
            accepted += 1
    return verified(k, requests, accepted, **more)


def shown(folder: Path) -> str:
    """What /metrics shows of a folder of metric files."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()
