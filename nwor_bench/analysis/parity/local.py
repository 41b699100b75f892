"""The local gate's verdict: each target layer of a window on its own inputs. Pure.

A recurrent state may differ from stock's by float32's sums and one rounding of its cache. The write
of K/V and convolution states must be stock's bit for bit, and no other row may change. Attention
may differ from
stock's by the rounding of one attention. How much that is, stock's own distance to a float64
reference shows, for each head. Signed errors average out over rows, so they show a wrong scale far
below the rounding of one row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.records.types import Cell

LOCAL_EVENT = "local_gate"

RMS_MULTIPLE = 2.0
"""Largest root mean square error of a head's rows, in multiples of stock's."""

FLOAT32_RMS = 4 * 2.0**-24
"""A head's root mean square error below this is none: four roundings of float32. Sums of hundreds
of terms in another order err by as much, and stock's may happen to be nearer: with float32 on an
H100 ours was off by 1.6e-7 and stock by 0.7e-7 at 512 tokens."""

ROW_MULTIPLE = 5.0
"""Largest distance of one row from stock's, in multiples of stock's largest row error in the
layer: both are off by about that much, and some rows more than those of the sample."""

HEAD_ERRORS = 9.0
"""Standard errors by which a head's signed error may differ from 0, beside twice stock's own."""

SCALE_SHARE = 0.25
"""A head's error of the softmax scale below this share of stock's root mean square error is none: a
few rows decide it, and those of one request share keys and values, so their roundings do not
average out as independent ones do. On an H200 one of 384 heads (Qwen3.5-27B, 8 requests) was off by
0.035 %, 9.3 standard errors."""

LAYER_ERRORS = 7.0
"""Standard errors for all heads of a layer together."""

MIN_ATTENTION_ROWS = 6
"""Rows of the sample with fewer give no standard error of one head."""

NOT_STOCK = 0.25
"""A reference from which stock's own output is further is not that of this attention."""

FLOOR = 1e-9
"""Errors below this are those of float64 itself."""


@dataclass(frozen=True)
class LocalFault:
    """One thing that is wrong in one layer."""

    kind: str
    """A key of `_EXACT` or of `_NEAR`."""
    layer: str
    rank: int
    error: float | None
    """Size of the error; None if it is not a finite number."""
    allowed: float
    where: str
    """Head, request and row, as far as they are known."""

    def sentence(self, ranks: int) -> str:
        """The fault, its place and its size."""
        rank = f" on rank {self.rank}" if ranks > 1 else ""
        at = f"local gate: {self.layer}{rank}{self.where}"
        if self.kind in _EXACT:
            return f"{at}: {_EXACT[self.kind].format(count=int(self.error or 0))}"
        size = "not a finite number" if self.error is None else f"{self.error:.2g}"
        return f"{at}: {_NEAR[self.kind]} is {size}, {self.allowed:.2g} is allowed"


_EXACT = {
    "write": "{count} rows of heads differ from stock's write of the same K and V",
    "other row": "{count} rows of the cache changed that this window does not write",
    "attention": "attention did not read the staged rows",
    "convolution": "{count} elements of convolution states differ from those that stock's leaves "
    "for the same inputs",
    "graph": "the graph that is timed gives other output than the one that is checked, in {count} "
    "elements",
}

_NEAR = {
    "row": "attention's distance from stock's, as a fraction of the head's row norm,",
    "head": "attention's root mean square error",
    "gain": "attention's signed error along the right output",
    "softmax scale": "the error of the softmax scale that fits attention's output",
    "state": "the distance of a recurrent state from stock's, as a fraction of the largest value,",
    "state output": "the distance of outputs from stock's, as a fraction of the head's largest,",
    "convolved": "the distance of the convolution's output from stock's, as a fraction of the "
    "largest,",
}


@dataclass(frozen=True)
class LocalResult:
    """The local gate's result for one cell; None if not checked."""

    verdict: KvVerdict
    reason: str | None = None
    windows: int = 0
    """Windows that were checked."""
    paths: tuple[str, ...] = ()
    """How they ran: "eager", "piecewise", "full graph", each perhaps beside a prefill."""
    layers: int = 0
    """Layers with K/V."""
    attended: int = 0
    """Layers whose attention was compared; the others' is stock's in every mode."""
    states: int = 0
    """Gated delta nets whose states were compared."""
    convolutions: int = 0
    """Gated delta nets whose convolutions were compared."""
    state_requests: int = 0
    """Requests of a window whose states were compared: its first ones."""
    written: int = 0
    """Rows x layers that were compared with stock's write."""
    rejected: int = 0
    """Rejected drafts in these windows, whose slots may not change."""
    ranks: int = 1
    whole_caches: int = 0
    """Layers of whose cache every row was watched."""
    nearest: float | None = None
    """The largest error of attention over what is allowed."""
    seconds: float = 0.0
    """Time that checking took on the first rank, the capture of a checking graph included."""
    graphs_equal: bool | None = None
    """The graph that is timed gave the checking one's output bit for bit; None: not comparable."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "verdict": str(self.verdict), "paths": list(self.paths)}


def local_event(cell: Cell, result: LocalResult) -> dict[str, Any]:
    """The result for the records."""
    return {"event": LOCAL_EVENT, **cell.names, **result.to_dict()}


def local_result(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> LocalResult:
    """The verdict on what each rank measured in a cell's windows.

    Args:
        ranks: by rank, the windows of `LayerChecks.take`.
    """
    windows = [(rank, window) for rank, of_rank in enumerate(ranks) for window in of_rank]
    if not windows:
        return LocalResult(KvVerdict.NOT_RUN, "no window was committed in a way that is checked")
    by_rank = [(rank, entry) for rank, window in windows for entry in window["layers"]]
    entries = [entry for _, entry in by_rank]
    unlike = next((e["layer"] for e in entries if _is_not_stock(e.get("attention"))), None)
    errors = [error for rank, entry in by_rank for error in _errors(rank, entry)]
    faults = [*_graph_faults(windows), *(error for error in errors if _ratio(error) > 1)]
    first = windows[0][1]
    result = {
        "windows": len(ranks[0]),
        "paths": tuple(dict.fromkeys(window["path"] for _, window in windows)),
        "layers": sum("state" not in entry for entry in first["layers"]),
        "attended": sum(entry.get("attention") is not None for entry in first["layers"]),
        # A step beside a prefill, often the first one, leaves its states to stock.
        "states": len({entry["layer"] for entry in entries if entry.get("state")}),
        "convolutions": len({entry["layer"] for entry in entries if _convolution(entry)}),
        "state_requests": max(
            (e["state"]["requests"] for e in entries if e.get("state")), default=0
        ),
        "written": sum(entry.get("written", 0) for entry in entries),
        "rejected": sum(window["rejected"] for window in ranks[0]),
        "ranks": len(ranks),
        "seconds": round(sum(window["seconds"] for window in ranks[0]), 3),
        "whole_caches": first["whole_caches"],
        "nearest": max((_ratio(error) for error in errors if error.kind in _NEAR), default=None),
        "graphs_equal": _graphs_equal(window for _, window in windows),
    }
    if result["nearest"] == float("inf"):
        result["nearest"] = None
    if faults:
        order = {entry["layer"]: n for n, entry in enumerate(first["layers"])}
        worst = min(faults, key=lambda fault: (order.get(fault.layer, -1), -_ratio(fault)))
        return LocalResult(KvVerdict.BROKEN, worst.sentence(len(ranks)), **result)
    reason = _nothing_compared(ranks)
    if unlike is not None:
        reason = f"the reference does not describe stock's attention in {unlike}"
    return LocalResult(KvVerdict.NOT_RUN if reason else KvVerdict.WITHIN, reason, **result)


def _nothing_compared(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """A check that compared nothing in any window of a rank; None if each compared something."""
    for rank, windows in enumerate(ranks):
        counts = [("windows", len(windows)), *(entry for w in windows for entry in _compared(w))]
        compared = {what for what, count in counts if count}
        missing = next((what for what, _ in counts if what not in compared), None)
        if missing is not None:
            need = max((w.get("copies_need", 0) for w in windows), default=0)  # not in older runs
            room = f": {FOR_COPIES} take {need / 1e9:.1f} GB, so give the cache less"
            more = room if need and missing == TIMED_OUTPUT else ""
            return f"nothing was compared of {missing}{f' on rank {rank}' * (len(ranks) > 1)}{more}"
    return None


TIMED_OUTPUT = "the timed graph's output"
FOR_COPIES = "copies of its states"
"""What had no room, in the reason why a graph's output was not compared."""


def _compared(window: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The checks of a window, and how much each compared."""
    if window["path"] == "full graph":
        graphs = window["graphs"]
        yield TIMED_OUTPUT, int(graphs is not None and not graphs["repeated"])
    for entry in window["layers"]:
        for name in ("state", "convolution"):
            if name in entry:
                yield f"{entry['layer']}'s {name}", (entry[name] or {}).get("compared", 0)
        if "written" in entry:  # else it reads another layer's K/V
            yield f"{entry['layer']}'s write", entry["written"]
        if entry.get("attention") is not None:
            yield f"{entry['layer']}'s attention", entry["attention"].get("rows", 0)


def _ratio(fault: LocalFault) -> float:
    if fault.error is None:
        return float("inf")
    return abs(fault.error) / max(fault.allowed, FLOOR)


def _graphs_equal(windows: Iterable[Mapping[str, Any]]) -> bool | None:
    known = [w["graphs"] for w in windows if w.get("graphs") and not w["graphs"]["repeated"]]
    return all(graphs["checking"] == 0 for graphs in known) if known else None


def _graph_faults(windows: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[LocalFault]:
    for rank, window in windows:
        graphs = window.get("graphs")
        if graphs and graphs["checking"] and not graphs["repeated"]:
            yield LocalFault("graph", "the model's output", rank, graphs["checking"], 0.0, "")


def _errors(rank: int, entry: Mapping[str, Any]) -> Iterator[LocalFault]:
    """Every error of one layer of a window that has a limit, broken or not; what must be equal
    only if it is not."""
    at = (entry["layer"], rank)
    if entry.get("differing"):
        request, row, head = entry["first_differing"]
        where = f", first in head {head} of row {row} of request {request}"
        yield LocalFault("write", *at, entry["differing"], 0.0, where)
    if entry.get("strangers"):
        block, row = entry["first_stranger"]
        where = f", first in block {block}" + (f", row {row}" if row >= 0 else "")
        yield LocalFault("other row", *at, entry["strangers"], 0.0, where)
    attention, state, convolution = entry.get("attention"), entry.get("state"), _convolution(entry)
    if attention is not None and "missing" in attention:
        yield LocalFault("attention", *at, None, 0.0, "")
    elif attention is not None:
        yield from _attention_errors(at, attention)
    if convolution.get("differing"):
        where = f", first in request {convolution['request']}"
        yield LocalFault("convolution", *at, convolution["differing"], 0.0, where)
    if state is not None:
        where = f", head {state['head']} of request {state['request']}, token {state['token']}"
        yield LocalFault("state", *at, state["error"], state["allowed"], where)
        where = f", head {state['output_head']}"
        yield LocalFault("state output", *at, state["output_error"], state["output_allowed"], where)
    if state is not None and convolution:
        errors = convolution["output_error"], convolution["output_allowed"]
        yield LocalFault("convolved", *at, *errors, "")


def _convolution(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return entry.get("convolution") or {}


def _is_not_stock(attention: Mapping[str, Any] | None) -> bool:
    if attention is None or "missing" in attention:
        return False
    return any((head["stock"] or 0.0) > NOT_STOCK for head in _heads(attention))


def _heads(attention: Mapping[str, Any]) -> list[dict[str, float | None]]:
    return [dict(zip(attention["fields"], head, strict=True)) for head in attention["heads"]]


def _attention_errors(at: tuple[str, int], attention: Mapping[str, Any]) -> Iterator[LocalFault]:
    heads = _heads(attention)
    largest = max(head["stock_largest"] or 0.0 for head in heads)
    for number, head in enumerate(heads):
        where = f", head {number}"
        row = attention["requests"][int(head["apart_row"] or 0)]
        yield LocalFault(
            "row", *at, head["apart"], ROW_MULTIPLE * largest, f"{where} of request {row}"
        )
        allowed = max(RMS_MULTIPLE * (head["stock"] or 0), FLOAT32_RMS)
        yield LocalFault("head", *at, head["ours"], allowed, where)
        if attention["rows"] >= MIN_ATTENTION_ROWS:
            values = [head[name] for name in attention["fields"][6:]]
            least = SCALE_SHARE * (head["stock"] or 0)
            yield from _signed(at, values, HEAD_ERRORS, where, least)
    yield from _signed(at, attention["pooled"], LAYER_ERRORS, "")


def _signed(
    at: tuple[str, int],
    values: Sequence[float | None],
    errors: float,
    where: str,
    least_scale: float = 0.0,
) -> Iterator[LocalFault]:
    """Signed errors against their standard errors and stock's; those without either are left out:
    a head whose output does not depend on the softmax scale has none."""
    for kind, (ours, error, stock), least in zip(
        ("gain", "softmax scale"), (values[:3], values[3:]), (0.0, least_scale), strict=True
    ):
        if ours is not None and error is not None and stock is not None:
            allowed = max(errors * error + 2 * abs(stock), least)
            yield LocalFault(kind, *at, ours, allowed, where)
