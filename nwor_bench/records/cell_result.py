"""A cell's summary and its possible verdicts."""

from dataclasses import dataclass, field
from enum import StrEnum

from nwor_bench.records.cell import Cell, NworMode, ScvMode, recorded_cell


class Verdict(StrEnum):
    """Verdict of one cell."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"
    CHECKED = "CHECKED"
    """Its output was compared, and nothing was timed, as asked."""
    INEFFECTIVE = "INEFFECTIVE"
    INVALID = "INVALID"


@dataclass(frozen=True)
class CellResult:
    """A cell's summary: sums over its timed batches and a paired ratio to off x off.

    A cell of which nothing was timed has the counts of its gate batch: `counts_from` says which.

    `ratio_to_off` is the cell's time over the baseline's on the same prompts, block by block;
    it is None if the cell is INEFFECTIVE or INVALID, and for the baseline itself.
    `compared` says which time: "window_ms", the mean time of windows of equal batch size and
    context (`matched_windows` of the cell's, `unmatched_windows` of both cells' left out), or
    "latency_ms" of whole batches if no window can be matched or was timed.
    `ratio_ci_*` is the cell's own 95 % interval; `ratio_simultaneous_*` the one that holds for all
    `simultaneous_cells` compared cells at once, and so for the one that came out best.
    `p_value` belongs to the ratio's own interval; `p_value_holm` is adjusted for the number of
    compared cells. `smallest_effect` is the smallest relative effect that the run could
    detect in this cell.
    `arm` is "A/A" for the second off x off.
    `interleaved` is set if the cell was interleaved with off x off by windows: "windows" if the
    ratio is that of `groups` groups of neighbouring windows (`compared` is then "device_ms" or
    "wall_ms"), "batches" if whole batches decided. `ratio_batches` is
    the ratio of whole batches.
    `scv_status` is the verdict on SCV: "off", "ok" or "INEFFECTIVE".
    `scv_status` is "not measured", and the counts of tokens, stage operations and fallbacks are
    None, for a cell that never ran.
    `ttft_ms_*`, `tpot_ms_*` and `itl_ms_*` are percentiles over the requests of all timed batches
    (see `RequestTimes`); p95 is None below 20 samples, p99 below 100.
    `parity` is "reference", "exact", "explained" (only ties differ), "acceptance only",
    "INVALID" or None (not checked).
    `verdict` is one of `Verdict`, or "reference" for the baseline.
    """

    pair: str
    nwor_mode: NworMode
    scv_mode: ScvMode
    batches: int
    windows: int
    requests: int
    output_tokens: int
    draft_tokens: int | None
    accepted_tokens: int | None
    acceptance_rate: float | None
    mean_accepted_per_window: float | None
    nwor_total_staged: int | None
    nwor_total_committed: int | None
    nwor_total_rejected: int | None
    nwor_stage_operations: int | None
    nwor_fallback_count: int | None
    bytes_staged: int | None
    bytes_committed: int | None
    bytes_avoided: int | None
    latency_ms_p50: float | None
    latency_ms_p95: float | None
    window_ms_mean: float | None
    tokens_per_s: float | None
    ratio_to_off: float | None
    ratio_ci_low: float | None
    ratio_ci_high: float | None
    parity: str | None
    verdict: str
    acceptance_length: float | None = None
    acceptance_per_position: tuple[float, ...] = ()
    nwor_unique_tokens: int | None = None
    scv_status: str = "off"
    scv_graph_hits: int | None = None
    scv_graph_captures: int | None = None
    scv_fallback_count: int | None = None
    scv_device_validations: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    scv_fallbacks: dict[str, int] = field(default_factory=dict)
    reason: str | None = None
    arm: str | None = None
    compared: str | None = None
    matched_windows: int | None = None
    unmatched_windows: int | None = None
    p_value: float | None = None
    p_value_holm: float | None = None
    smallest_effect: float | None = None
    ratio_simultaneous_low: float | None = None
    ratio_simultaneous_high: float | None = None
    simultaneous_cells: int | None = None
    interleaved: str | None = None
    groups: int | None = None
    ratio_batches: float | None = None
    ratio_batches_low: float | None = None
    ratio_batches_high: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_p95: float | None = None
    ttft_ms_p99: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p95: float | None = None
    tpot_ms_p99: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p95: float | None = None
    itl_ms_p99: float | None = None
    counts_from: str | None = None

    @property
    def half_width(self) -> float | None:
        """Half the ratio's interval, a fraction; None if there is none."""
        if self.ratio_ci_low is None or self.ratio_ci_high is None:
            return None
        return (self.ratio_ci_high - self.ratio_ci_low) / 2

    @property
    def label(self) -> str:
        """For people: `stage x graph`."""
        return self.cell.label

    @property
    def cell(self) -> Cell:
        """The summarised cell."""
        return recorded_cell(self.pair, self.nwor_mode, self.scv_mode, self.arm)
