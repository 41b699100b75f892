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
    """The same of committed tokens."""
    bytes_avoided: int | None
    """The same of rejected tokens: bytes that direct writes would have wasted."""
    latency_ms_p50: float | None
    """Median time of a batch."""
    latency_ms_p95: float | None
    """95th percentile of the time of a batch."""
    window_ms_mean: float | None
    """Mean `wall_ms` of the windows of whole batches, or of interleaved ones if there are none."""
    tokens_per_s: float | None
    """Output tokens per second of the batches' time."""
    ratio_to_off: float | None
    """Time over that of off x off on the same prompts; None for off x off itself, INEFFECTIVE and
    INVALID."""
    ratio_ci_low: float | None
    """Low end of the ratio's own 95 % interval."""
    ratio_ci_high: float | None
    """High end of it."""
    parity: str | None
    """"reference", "exact", "explained" (only ties differ), "acceptance only", "INVALID"; None if
    not checked."""
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
    p_value: float | None = None
    """Of the ratio's own interval."""
    p_value_holm: float | None = None
    """The same, adjusted for the number of compared cells."""
    smallest_effect: float | None = None
    """Smallest relative effect that the run could detect in this cell."""
    ratio_simultaneous_low: float | None = None
    """Low end of the interval that holds for all compared cells at once."""
    ratio_simultaneous_high: float | None = None
    """High end of it."""
    simultaneous_cells: int | None = None
    """Number of compared cells."""
    interleaved: str | None = None
    """"windows" if the ratio is that of interleaved windows, "batches" if whole batches decided;
    None if not interleaved."""
    groups: int | None = None
    """Groups of neighbouring windows behind the ratio."""
    ratio_batches: float | None = None
    """Ratio of whole batches, in an interleaved run."""
    ratio_batches_low: float | None = None
    """Low end of its 95 % interval."""
    ratio_batches_high: float | None = None
    """High end of it."""
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
    tokens_per_s_ratio: float | None = None
    """Output tokens per second of decoding over those of off x off, from the same groups or blocks
    (see `analysis.throughput`). Time per output token over that of off x off is 1 / this."""
    tokens_per_s_ratio_low: float | None = None
    """Low end of its own 95 % interval."""
    tokens_per_s_ratio_high: float | None = None
    """High end of it."""
    tokens_per_s_ratio_simultaneous_low: float | None = None
    """Low end of its interval that holds for all compared cells at once."""
    tokens_per_s_ratio_simultaneous_high: float | None = None
    """High end of it."""
    tokens_per_s_clock: str | None = None
    """The time behind it: "wall_ms" (windows of groups, host clock), "window_ms" or "latency_ms"
    (whole batches)."""
    tokens_per_s_noise: str | None = None
    """What scatters most in it: "acceptance" (accepted drafts differ by chance) or "time"."""
    work_ratio: float | None = None
    """The GPU's own work over that of off x off (forward, sample, mask and commit on the device's
    clock), in the groups behind the ratio; None if windows were not interleaved on a GPU."""
    work_ratio_ci_low: float | None = None
    """Low end of its own 95 % interval."""
    work_ratio_ci_high: float | None = None
    """High end of it."""
    state_bytes_committed: int | None = None
    """Bytes of the recurrent states that commits wrote, one a request, layer and window."""
    state_bytes_avoided: int | None = None
    """Bytes of those that stock would have written beside them."""

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
