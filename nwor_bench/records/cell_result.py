"""A cell's summary and its possible verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from nwor_bench.records.cell import Cell, NworMode, ScvMode, recorded_cell
from nwor_bench.stats.interval import Interval


class Verdict(StrEnum):
    """Verdict of one cell."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"
    CHECKED = "CHECKED"
    """Output was compared and nothing was timed, as asked."""
    NOT_MEASURED = "NOT MEASURED"
    """A draft count without a ratio: too few windows, blocks or prompts."""
    INEFFECTIVE = "INEFFECTIVE"
    INVALID = "INVALID"


_HIGH = "High end of it."

_INTERVAL_COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "ratio": {
        "ratio_to_off": ("ratio.value", "Time over that of off x off on the same prompts; None for "
                         "off x off itself, INEFFECTIVE and INVALID."),
        "ratio_ci_low": ("ratio.low", "Low end of the ratio's own 95 % interval."),
        "ratio_ci_high": ("ratio.high", _HIGH),
    },
    "sure": {
        "p_value": ("ratio.p_value", "p value of the ratio's own interval."),
        "p_value_holm": ("sure.p_value", "p value, adjusted for the compared cells."),
        "smallest_effect": (
            "", "Smallest relative effect that the run could detect in this cell."),
        "ratio_simultaneous_low": (
            "sure.low", "Low end of the interval that holds for all compared cells at once."),
        "ratio_simultaneous_high": ("sure.high", _HIGH),
    },
    "whole": {
        "ratio_batches": ("whole.value", "Ratio of whole batches, in an interleaved run."),
        "ratio_batches_low": ("whole.low", "Low end of its 95 % interval."),
        "ratio_batches_high": ("whole.high", _HIGH),
    },
    "rate": {
        "tokens_per_s_ratio": ("rate.value", "Output tokens per second of decoding over those of "
                               "off x off, from the same groups or blocks (see "
                               "`analysis.throughput`). Time per output token over that of "
                               "off x off is 1 / this."),
        "tokens_per_s_ratio_low": ("rate.low", "Low end of its own 95 % interval."),
        "tokens_per_s_ratio_high": ("rate.high", _HIGH),
    },
    "sure_rate": {
        "tokens_per_s_ratio_simultaneous_low": (
            "sure_rate.low", "Low end of its interval that holds for all compared cells at once."),
        "tokens_per_s_ratio_simultaneous_high": ("sure_rate.high", _HIGH),
    },
    "work": {
        "work_ratio": ("work.value", "The GPU's own work over that of off x off (forward, sample, "
                       "mask and commit on the device's clock), in the groups behind the ratio; "
                       "None if windows were not interleaved on a GPU."),
        "work_ratio_ci_low": ("work.low", "Low end of its own 95 % interval."),
        "work_ratio_ci_high": ("work.high", _HIGH),
    },
}  # fmt: skip
"""Columns at the place of an interval's field: the part that each holds, and its meaning.

`smallest_effect` is computed.
"""

_PARTS = {
    column: part.split(".")
    for columns in _INTERVAL_COLUMNS.values()
    for column, (part, _) in columns.items()
}


@dataclass(frozen=True)
class CellResult:
    """A cell's summary: sums over its timed batches and a paired ratio to off x off.

    Counts are those of its gate batch if nothing of it was timed, None if it never ran.
    Percentiles of request times are over all timed batches (see `RequestTimes`); p95 is None below
    20 samples, p99 below 100.
    """

    pair: str
    """Name of the pair of models."""
    nwor_mode: NworMode
    """The cell's NWOR mode."""
    scv_mode: ScvMode
    """The cell's SCV mode."""
    batches: int
    """Timed batches."""
    windows: int
    """Counted windows."""
    requests: int
    """Requests in counted batches (`counts_from`)."""
    output_tokens: int
    """Output tokens of counted batches."""
    draft_tokens: int | None
    """Draft tokens that the target verified."""
    accepted_tokens: int | None
    """Draft tokens that the target accepted, staged or not."""
    acceptance_rate: float | None
    """Accepted over draft tokens."""
    mean_accepted_per_window: float | None
    """Accepted tokens over windows."""
    nwor_total_staged: int | None
    """Draft tokens whose K/V was kept out of the cache."""
    nwor_total_committed: int | None
    """Staged tokens that were accepted and written to the cache."""
    nwor_total_rejected: int | None
    """Staged tokens that were dropped."""
    nwor_stage_operations: int | None
    """Staged tokens x target layers."""
    nwor_fallback_count: int | None
    """Windows that were written directly in mode stage."""
    bytes_staged: int | None
    """Staged tokens x cache bytes of a token over all target layers."""
    bytes_committed: int | None
    """Committed tokens x cache bytes of a token over all target layers."""
    bytes_avoided: int | None
    """Rejected tokens x cache bytes of a token: direct writes would have wasted them."""
    latency_ms_p50: float | None
    """Median time of a batch."""
    latency_ms_p95: float | None
    """95th percentile of the time of a batch."""
    window_ms_mean: float | None
    """Mean `wall_ms` of the windows of whole batches, or of interleaved ones if there are none."""
    tokens_per_s: float | None
    """Output tokens per second of the batches' time."""
    ratio: Interval | None
    """Time over that of off x off."""
    parity: str | None
    """"reference", "exact", "explained" (only ties differ), "acceptance only", "lossy" (FLy),
    "INVALID"; None if not checked."""
    verdict: str
    """One of `Verdict`, or "reference" for off x off."""
    acceptance_length: float | None = None
    """1 + accepted tokens over a request's windows."""
    acceptance_per_position: tuple[float, ...] = ()
    """Acceptance rate of each draft position."""
    nwor_unique_tokens: int | None = None
    """Staged tokens, each once."""
    scv_status: str = "off"
    """Verdict on SCV alone: "off", "ok", "INEFFECTIVE" or "not measured"."""
    scv_graph_hits: int | None = None
    """Validations by replay of a CUDA graph."""
    scv_graph_captures: int | None = None
    """CUDA graphs captured."""
    scv_fallback_count: int | None = None
    """Windows in which SCV did not decide as its mode says."""
    scv_device_validations: int | None = None
    """Validations by the device kernel, launched without a graph."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Windows written directly in mode stage, by reason."""
    scv_fallbacks: dict[str, int] = field(default_factory=dict)
    """SCV's fallbacks, by reason."""
    reason: str | None = None
    """Why the cell is INVALID, INEFFECTIVE or AMBIGUOUS."""
    arm: str | None = None
    """"A/A" for the second off x off, else None."""
    compared: str | None = None
    """The time behind the ratio: "window_ms" (windows of equal batch size and context),
    "device_ms" or "wall_ms" (interleaved), else "latency_ms"."""
    matched_windows: int | None = None
    """The cell's windows behind a ratio of "window_ms"."""
    unmatched_windows: int | None = None
    """Windows of both cells that such a ratio leaves out."""
    sure: Interval | None = None
    """The ratio's interval that holds for all compared cells at once; its p value is Holm's."""
    simultaneous_cells: int | None = None
    """Number of compared cells."""
    interleaved: str | None = None
    """"windows" if the ratio is that of interleaved windows, "batches" if whole batches decided;
    None if not interleaved."""
    groups: int | None = None
    """Groups of neighbouring windows behind the ratio."""
    whole: Interval | None = None
    """Time of whole batches over that of off x off, in an interleaved run."""
    ttft_ms_p50: float | None = None
    """Median of the time to first token."""
    ttft_ms_p95: float | None = None
    """95th percentile of the time to first token."""
    ttft_ms_p99: float | None = None
    """99th percentile of the time to first token."""
    tpot_ms_p50: float | None = None
    """Median of the time per output token."""
    tpot_ms_p95: float | None = None
    """95th percentile of the time per output token."""
    tpot_ms_p99: float | None = None
    """99th percentile of the time per output token."""
    counts_from: str | None = None
    """Phase of the batches that were counted: "timed", or "gate" if none was timed."""
    rate: Interval | None = None
    """Output tokens per second over those of off x off."""
    sure_rate: Interval | None = None
    """The rate's interval that holds for all compared cells at once."""
    tokens_per_s_clock: str | None = None
    """The time behind it: "wall_ms" (windows of groups, host clock), "window_ms" or "latency_ms"
    (whole batches)."""
    tokens_per_s_noise: str | None = None
    """What scatters most in it: "acceptance" (accepted drafts differ by chance) or "time"."""
    work: Interval | None = None
    """Time of the GPU's own work over that of off x off."""
    state_bytes_committed: int | None = None
    """Bytes of the recurrent states that commits wrote, one a request, layer and window."""
    state_bytes_avoided: int | None = None
    """Bytes of those that stock would have written beside them."""

    INTERVAL_COLUMNS: ClassVar = _INTERVAL_COLUMNS

    if not TYPE_CHECKING:

        def __getattr__(self, column: str) -> float | None:
            """A part of an interval by its column's name, for files and notebooks."""
            if column not in _PARTS:
                raise AttributeError(column)
            name, part = _PARTS[column]
            interval = getattr(self, name)
            known = interval is not None and (part == "value" or interval.is_bounded)
            return getattr(interval, part) if known else None

    @property
    def half_width(self) -> float | None:
        """Half the ratio's interval, a fraction; None if there is none."""
        return self.ratio.half_width if self.ratio and self.ratio.is_bounded else None

    @property
    def smallest_effect(self) -> float | None:
        """Smallest relative effect that the run could detect in this cell."""
        from nwor_bench.stats.multiple import smallest_change  # numpy

        if self.ratio is None or not self.ratio.is_bounded:
            return None
        return smallest_change(self.ratio, self.simultaneous_cells or 1)

    @property
    def label(self) -> str:
        """For people: `stage x graph`."""
        return self.cell.label

    @property
    def cell(self) -> Cell:
        """The summarised cell."""
        return recorded_cell(self.pair, self.nwor_mode, self.scv_mode, self.arm)
