"""A server's /metrics as one reading: times of every cell over the reference, by batch size.

The reference is off x off if modes are interleaved, k = 0 if draft counts are. Cell 0 is the
reference against itself; other cells are STAGE, or the draft counts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from nwor_bench.analysis.draft_rates import AtSize, Rate, SpanTokens, Worth, worth_at
from nwor_bench.errors import BenchError, ConfigError
from nwor_bench.instruments.draft_counts import MAX_KEPT
from nwor_bench.records.header import PairFacts
from nwor_bench.records.window_order import ALL
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import from_ends

TIMEOUT_S = 10.0
START_SERVER = (
    "start the server with VLLM_NWOR_MODE=interleave (modes) or VLLM_NWOR_DRAFTS=interleave (draft "
    "counts; docs/live.md)"
)

STALE_AFTER_S = 30.0
"""A server updates its metrics every few seconds; after this long it no longer does."""

ITSELF, STAGE = 0, 1
"""Cells of a server in which modes are interleaved: off against itself (A/A), and stage."""


class Unreachable(BenchError):
    """The server does not answer, answers with an error, or no longer updates its metrics."""


class Interleaved(StrEnum):
    """What is interleaved; the value begins the names of its metrics."""

    MODES = "nwor_live_"
    DRAFTS = "nwor_drafts_"


@dataclass(frozen=True)
class CellTimes:
    """What a server shows of one cell in one class of batch sizes."""

    groups: int = 0
    ratio: Interval | None = None
    """Time of a window over the reference's; None until there are enough groups for an interval."""
    tokens: Interval | None = None
    """Tokens of a request in a window; only of draft counts."""


@dataclass(frozen=True)
class Reading:
    """One reading of one worker's metrics."""

    kind: Interleaved
    cells: Sequence[int]
    """Cells that are compared with the reference."""
    classes: Mapping[str, Mapping[int, CellTimes]]
    """By class of batch sizes, small ones first and `all` last, and cell."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Groups that do not count, by reason."""
    clock: str | None = None
    """`device` or `host`; None before the first ratio."""
    stopped: str | None = None
    """The guard that stopped staging for good; None while it goes on, or if nothing is staged."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Windows written directly, by reason."""
    scv_mode: str = ""
    """SCV mode of stage."""
    windows: Mapping[int, int] = field(default_factory=dict)
    """Windows by draft count, 0 among them."""
    pair: PairFacts = field(default_factory=PairFacts)
    """Method and drafter, if draft counts are interleaved."""
    counted: Sequence[float] | None = None
    """Values of VLLM_METRICS; None if they are not there."""
    felt: Sequence[float] | None = None
    """Values of FELT_METRICS; None if they are not there."""

    def of(self, num_reqs: str, cell: int = STAGE) -> CellTimes:
        """A cell in a class, perhaps still empty."""
        return self.classes.get(num_reqs, {}).get(cell, CellTimes())

    def groups(self, num_reqs: str) -> int:
        """Groups of the cell that has the fewest in this class."""
        return min((self.of(num_reqs, cell).groups for cell in self.cells), default=0)

    def half_width(self, num_reqs: str) -> float | None:
        """Half the widest interval of a cell, as a fraction; None if one has none."""
        if self.kind is Interleaved.MODES:
            ratio = self.of(num_reqs).ratio
            return None if ratio is None else ratio.half_width
        ratios = [rate.ratio for rate in self.rates(num_reqs)]
        known = [ratio.ln().half_width for ratio in ratios if ratio and ratio.is_bounded]
        return max(known) if known and len(known) == len(self.cells) else None

    def rates(self, num_reqs: str) -> tuple[Rate, ...]:
        """Tokens/s over k = 0 in this class, by draft count."""
        return worth_at([self._at_size(num_reqs)], self.cells, 0).rates

    def worth(self, num_reqs: str = ALL) -> Worth:
        """Which draft counts pay, in this class or in all that are known."""
        chosen = [
            self._at_size(name)
            for name in self.classes
            if name != ALL
            and num_reqs in (ALL, name)
            and any(rate.ratio for rate in self.rates(name))
        ]
        return worth_at(chosen, self.cells, 0)

    def _at_size(self, num_reqs: str) -> AtSize:
        least, _, most = ("0" if num_reqs == ALL else num_reqs).partition("-")
        cells = self.classes.get(num_reqs, {})
        return AtSize(
            int(most or least),
            int(least),
            times={k or None: cell.ratio.ln() for k, cell in cells.items() if cell.ratio},
            tokens=SpanTokens({k: cell.tokens.ln() for k, cell in cells.items() if cell.tokens}),
        )


def metrics_address(url: str) -> str:
    """The address of the server's /metrics, of http if it names no scheme. Raises ConfigError if it
    is not one."""
    url = url if "://" in url else f"http://{url}"
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


def read(address: str) -> Reading:
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
                "URL", address, f"no metrics are there; {START_SERVER}"
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


def reading_of(text: str, address: str, now: float | None = None) -> Reading:
    """The reading of a page of metrics at Unix time `now`, of the worker with the lowest rank.

    Raises ConfigError if no such metrics are there, Unreachable if they are old.
    """
    samples = _samples(text)
    kind = next((k for k in (Interleaved.DRAFTS, Interleaved.MODES) if _named(samples, k)), None)
    if kind is None:
        raise ConfigError.for_field("URL", address, _why_not_live(samples))
    updated = [gauge.value for gauge in _named(samples, "nwor_live_updated_seconds")]
    if updated and now is not None and now - min(updated) > STALE_AFTER_S:
        problem = f"has not updated its metrics for {now - min(updated):.0f} s; its log says why"
        raise Unreachable.at(address, problem, joint=" ")
    every = _named(samples, kind)
    rank = min((sample.labels.get("rank", "0") for sample in every), key=int)
    of_rank = [sample for sample in every if sample.labels.get("rank", "0") == rank]
    counted = _named(of_rank, "nwor_drafts_windows_total")
    windows = {int(sample.labels["drafts"]): int(sample.value) for sample in counted}
    clocks = [s.labels["clock"] for s in of_rank if "clock" in s.labels and s.name in _RATIOS]
    known = [sample.labels for sample in _named(of_rank, "nwor_drafts_info")]
    info: Mapping[str, str] = known[0] if known else {}
    return Reading(
        kind=kind,
        cells=[STAGE] if kind is Interleaved.MODES else sorted(k for k in windows if k),
        classes=_classes(of_rank),
        left_out=_by_reason(of_rank, f"{kind}groups_left_out_total"),
        clock=clocks[-1] if clocks else None,
        stopped=next(iter(_by_reason(every, "nwor_live_staging_stopped_total")), None),
        fallbacks=_by_reason(samples, "nwor_fallback_count_total", rank=rank),
        scv_mode=of_rank[0].labels.get("scv_mode", ""),
        windows=dict(sorted(windows.items())),
        pair=PairFacts(method=info.get("method", ""), draft=info.get("model") or None),
        counted=_sums(samples, VLLM_METRICS),
        felt=_sums(samples, FELT_METRICS),
    )


def _sums(samples: Sequence[Any], names: Sequence[str]) -> list[float] | None:
    """Each metric's sum over the engines; None if one is missing."""
    values = [[sample.value for sample in samples if sample.name == name] for name in names]
    return list(map(sum, values)) if all(values) else None


VLLM_METRICS = (
    "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:generation_tokens_total", "vllm:num_requests_running",
)  # fmt: skip
"""vLLM's own: three counters, and the requests that run; each has a sample an engine."""

FELT_METRICS = (
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_sum",
    "vllm:generation_tokens_total",
)  # fmt: skip
"""Counters of what users feel beside decoding: tokens looked up in the prefix cache and found,
requests, seconds to their first tokens, tokens."""

_RATIOS = ("nwor_live_ratio", "nwor_drafts_time_ratio")


def _samples(text: str) -> list[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    read = ("nwor_", "# HELP nwor_", "# TYPE nwor_", *VLLM_METRICS, *FELT_METRICS)
    lines = [line for line in text.splitlines() if line.startswith(read)]
    try:
        families = list(text_string_to_metric_families("\n".join([*lines, ""])))
    except ValueError:
        return []
    return [sample for family in families for sample in family.samples]


def _named(samples: Sequence[Any], start: str) -> list[Any]:
    return [sample for sample in samples if sample.name.startswith(start)]


def _why_not_live(samples: Sequence[Any]) -> str:
    attached = [r for r in _by_reason(samples, "nwor_fallback_count_total") if "attach:" in r]
    if attached:
        return f"nwor-bench is not attached there ({attached[0]}); the server's log says why"
    modes = {sample.labels.get("nwor_mode") for sample in samples}
    mode = next((mode for mode in modes if mode), None)
    if mode is not None:
        return f"that server runs only in mode {mode}; {START_SERVER}"
    return (
        f"no metrics of nwor-bench are there; {START_SERVER}, with speculation, and without "
        "VLLM_NWOR_METRICS=0"
    )


def _classes(samples: Sequence[Any]) -> dict[str, dict[int, CellTimes]]:
    """Every cell's values, by class of batch sizes."""
    values: dict[str, dict[int, dict[str, float]]] = {ALL: {}}
    for sample in samples:
        if "num_reqs" in sample.labels:
            name = sample.name.removeprefix(Interleaved.DRAFTS).removeprefix(Interleaved.MODES)
            cell = int(sample.labels.get("drafts", ITSELF if name.startswith("aa_") else STAGE))
            cells = values.setdefault(sample.labels["num_reqs"], {})
            cells.setdefault(cell, defaultdict(int))[name.removeprefix("aa_")] = sample.value
    return {
        size: {cell: _cell_times(by_name) for cell, by_name in values[size].items()}
        for size in sorted(values, key=_smallest)
    }


def _smallest(num_reqs: str) -> float:
    return float("inf") if num_reqs == ALL else int(num_reqs.partition("-")[0])


def _cell_times(values: Mapping[str, float]) -> CellTimes:
    groups, spans = int(values["groups_total"]), int(values["spans_total"])
    ratio = _interval(values, "time_ratio" if "time_ratio" in values else "ratio", groups)
    return CellTimes(groups, ratio, _interval(values, "tokens", spans))


def _interval(values: Mapping[str, float], name: str, count: int) -> Interval | None:
    if name not in values:
        return None
    ends = (values[name], values[f"{name}_low"], values[f"{name}_high"])
    return from_ends(*ends, min(count, MAX_KEPT))


def _by_reason(samples: Sequence[Any], name: str, **labels: str) -> dict[str, int]:
    """Numbers above 0 by reason, the largest first."""
    counts: dict[str, int] = {}
    for sample in samples:
        if sample.name == name and sample.value and labels.items() <= sample.labels.items():
            reason = sample.labels.get("reason", "")
            counts[reason] = max(counts.get(reason, 0), int(sample.value))
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
