"""Read a server's /metrics until the interval is narrow enough or the time is up.

Modes or draft counts alternate there; the reading of draft counts is in `live_drafts`. The ratio
itself never ends it (see `workload.stopping`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http.client import HTTPException
from math import ceil
from typing import Any, Generic, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from nwor_bench.cli.live_drafts import DraftReading, read_drafts
from nwor_bench.errors import BenchError, ConfigError
from nwor_bench.records.window_order import ALL
from nwor_bench.workload.stopping import LOOK_STEP

TIMEOUT_S = 10.0
REMEDY = (
    "start the server with VLLM_NWOR_MODE=interleave (modes) or VLLM_NWOR_DRAFTS=interleave (draft "
    "counts; docs/live.md)"
)
PREFIX = "nwor_"

EVERY_S = 1.0
"""Time between two readings."""

STALE_AFTER_S = 30.0
"""A server updates its metrics every few seconds; after this long it no longer does."""

GONE_AFTER_S = 10.0
"""A server without an answer for this long is gone."""

FIRST_LOOK = 200
"""Fewest groups whose interval may end it."""

AGAIN = 2
"""It ends at this many times the groups at which the interval was first narrow enough: that first
interval is partly luck, the groups after it are not (sweeps/studies/interval-coverage)."""


class Unreachable(BenchError):
    """The server does not answer, answers with an error, or no longer updates its metrics."""


@dataclass(frozen=True)
class ClassRatio:
    """Stage over off in windows of one class of batch sizes."""

    num_reqs: str
    groups: int = 0
    ratio: float | None = None
    """None until there are enough groups for an interval, like its ends."""
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half the interval; None without one."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class Reading:
    """One reading of one worker's metrics."""

    scv_mode: str
    classes: dict[str, ClassRatio]
    """By class, small batches first, `all` last."""
    left_out: dict[str, int]
    """Groups that do not count, by reason."""
    stopped: str | None
    """The guard that stopped staging for good; None while it goes on."""
    clock: str | None
    """`device` or `host`; None before the first ratio."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Windows written directly, by reason."""
    aa: ClassRatio = ClassRatio(ALL)
    """Off over off: the noise floor."""

    def of(self, num_reqs: str) -> ClassRatio:
        """The class, perhaps still empty."""
        return self.classes.get(num_reqs, ClassRatio(num_reqs))


R = TypeVar("R", Reading, DraftReading)


def metrics_address(url: str) -> str:
    """The address of the server's /metrics. Raises ConfigError if it is not one."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        usable = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # an invalid port or host name
        usable = False
    if not usable or not url.isascii() or any(char.isspace() for char in url):
        raise ConfigError.for_field("URL", url, "write for example http://localhost:8000")
    if parts.username is not None:
        remedy = "no name or password can be sent; write for example http://localhost:8000"
        raise ConfigError.for_field("URL", f"{parts.scheme}://...@{parts.hostname}", remedy)
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics").geturl()


def read(address: str) -> Reading | DraftReading:
    """Ask the server once.

    Raises:
        Unreachable: nothing answers there, or with an error or old metrics.
        ConfigError: the answer has no metrics of either kind; the message says what to set.
    """
    try:
        with urlopen(address, timeout=TIMEOUT_S) as response:
            text = response.read().decode("utf-8", "replace")
            date = response.headers["Date"]
    except HTTPError as error:
        error.close()
        if error.code == 404:
            raise ConfigError.for_field(
                "URL", address, f"no metrics are there; {REMEDY}"
            ) from error
        raise Unreachable.at(
            address, f"answers with {error.code} ({error.reason})", error.code, joint=" "
        ) from error
    except (URLError, HTTPException, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise Unreachable.at(
            address, f"does not answer ({why}); is the server up?", joint=" "
        ) from error
    # The server's own clock: this machine's may be another.
    return reading_of(text, address, parsedate_to_datetime(date).timestamp() if date else None)


def reading_of(text: str, address: str, now: float | None = None) -> Reading | DraftReading:
    """One reading of the metrics, of either kind, at Unix time `now`.

    Raises ConfigError if none is there, Unreachable if they are old.
    """
    samples = _samples(text)
    drafts = any(sample.name.startswith("nwor_drafts_") for sample in samples)
    found = read_drafts(samples) if drafts else _of_modes(samples, address)
    updated = [each.value for each in samples if each.name == "nwor_live_updated_seconds"]
    if updated and now is not None and now - min(updated) > STALE_AFTER_S:
        problem = f"has not updated its metrics for {now - min(updated):.0f} s; its log says why"
        raise Unreachable.at(address, problem, joint=" ")
    return found


def _of_modes(samples: list[Any], address: str) -> Reading:
    live = [sample for sample in samples if sample.name.startswith("nwor_live_")]
    if not live:
        raise ConfigError.for_field("URL", address, _why_not_live(samples))
    rank = min((sample.labels.get("rank", "0") for sample in live), key=int)
    own = [sample for sample in live if sample.labels.get("rank", "0") == rank]
    ratios = [sample for sample in own if sample.name == "nwor_live_ratio"]
    return Reading(
        scv_mode=own[0].labels.get("scv_mode", ""),
        classes=_classes(own),
        left_out=_by_reason(own, "nwor_live_groups_left_out_total"),
        stopped=next(iter(_by_reason(live, "nwor_live_staging_stopped_total")), None),
        clock=ratios[-1].labels.get("clock") if ratios else None,
        fallbacks=_by_reason(samples, "nwor_fallback_count_total", rank=rank),
        aa=_classes(own, "nwor_live_aa_")[ALL],
    )


def _samples(text: str) -> list[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    ours = (f"{PREFIX}", f"# HELP {PREFIX}", f"# TYPE {PREFIX}")
    lines = [line for line in text.splitlines() if line.startswith(ours)]
    try:
        families = list(text_string_to_metric_families("\n".join([*lines, ""])))
    except ValueError:
        return []
    return [sample for family in families for sample in family.samples]


def _why_not_live(samples: list[Any]) -> str:
    attached = [r for r in _by_reason(samples, "nwor_fallback_count_total") if "attach:" in r]
    if attached:
        return f"nwor-bench is not attached there ({attached[0]}); the server's log says why"
    modes = {sample.labels.get("nwor_mode") for sample in samples}
    mode = next((mode for mode in modes if mode), None)
    if mode is not None:
        return f"that server runs only in mode {mode}; {REMEDY}"
    return (
        f"no metrics of nwor-bench are there; {REMEDY}, with speculation, and without "
        "VLLM_NWOR_METRICS=0"
    )


def _classes(samples: list[Any], prefix: str = "nwor_live_") -> dict[str, ClassRatio]:
    fields = {
        f"{prefix}groups_total": "groups",
        f"{prefix}ratio": "ratio",
        f"{prefix}ratio_low": "low",
        f"{prefix}ratio_high": "high",
    }
    found: dict[str, dict[str, Any]] = {ALL: {}}
    for sample in samples:
        if sample.name in fields:
            value = int(sample.value) if fields[sample.name] == "groups" else sample.value
            found.setdefault(sample.labels["num_reqs"], {})[fields[sample.name]] = value
    return {name: ClassRatio(name, **found[name]) for name in sorted(found, key=_size)}


def _size(num_reqs: str) -> float:
    return float("inf") if num_reqs == ALL else int(num_reqs.partition("-")[0])


def _by_reason(samples: list[Any], name: str, **labels: str) -> dict[str, int]:
    """Counts above 0, the largest first."""
    found: dict[str, int] = {}
    for sample in samples:
        if sample.name == name and sample.value and labels.items() <= sample.labels.items():
            reason = sample.labels.get("reason", "")
            found[reason] = max(found.get(reason, 0), int(sample.value))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


class Ended(StrEnum):
    """Why it ended."""

    WIDTH = "ci_width"
    TIME = "time_budget"
    STOPPED = "staging_stopped"
    GONE = "server_gone"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Wanted:
    """When to end."""

    num_reqs: str
    """The class whose interval counts."""
    ci_width: float
    """Half the interval, a fraction."""
    time_budget_s: float


@dataclass
class WidthRule:
    """Decides whether the interval is narrow enough."""

    ci_width: float
    next_look: int = FIRST_LOOK
    """Groups at the next look at the width."""
    end_at: int | None = None
    """Groups at which it ends; None until a look found the interval narrow."""
    is_first: bool = True
    """The first reading may end it at once: nobody waited for it to be narrow."""

    def is_met(self, groups: int, half_width: float | None) -> bool:
        """Call it with growing groups; the width counts only at looks."""
        first, self.is_first = self.is_first, False
        if self.end_at is None and groups >= self.next_look:
            if half_width is not None and half_width <= self.ci_width:
                self.end_at = groups if first else AGAIN * groups
            self.next_look = ceil(groups * LOOK_STEP)
        return self.end_at is not None and groups >= self.end_at


@dataclass(frozen=True)
class Seen(Generic[R]):
    """The last reading, and what ended it."""

    reading: R
    ended: Ended
    waited_s: float


def watch(
    read: Callable[[], R],
    wanted: Wanted,
    show: Callable[[R, float], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Seen[R]:
    """Watch a server; raises what the first reading raises."""
    began = answered = clock()
    reading, rule, ended = read(), WidthRule(wanted.ci_width), None
    try:
        while True:
            waited = clock() - began
            show(reading, waited)
            ended = _ended(reading, wanted, waited, rule)
            if ended is not None:
                break
            sleep(min(EVERY_S, max(0.0, wanted.time_budget_s - waited)))
            try:
                latest, answered = read(), clock()
            except (Unreachable, ConfigError):  # as a proxy answers while its server restarts
                if clock() - answered > GONE_AFTER_S:
                    ended = Ended.GONE
                    break
                continue
            if latest.of(wanted.num_reqs).groups < reading.of(wanted.num_reqs).groups:
                rule = WidthRule(wanted.ci_width)  # the server has restarted
            reading = latest
    except KeyboardInterrupt:
        ended = Ended.INTERRUPTED
    return Seen(reading, ended, clock() - began)


def _ended(
    reading: Reading | DraftReading, wanted: Wanted, waited: float, rule: WidthRule
) -> Ended | None:
    """Why to end now, if so."""
    if reading.stopped is not None:
        return Ended.STOPPED
    own = reading.of(wanted.num_reqs)
    if rule.is_met(own.groups, own.half_width):
        return Ended.WIDTH
    return Ended.TIME if waited >= wanted.time_budget_s else None
