"""Summaries and verdicts of cells, recomputed by hand from the records."""

from dataclasses import replace
from statistics import median

import pytest
from synthetic_run import (
    BYTES_PER_TOKEN,
    LAYERS,
    change_batches,
    change_windows,
    faults_of,
    header_of,
    kept,
    make_run,
)

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.invariants import counter_checks, full_windows, windows_by_batch
from nwor_bench.analysis.parity.tokens import REFERENCE
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Phase, Verdict


def cell(run: RunData, nwor: str, scv: str) -> CellResult:
    (found,) = [c for c in analyse(run).cells if (c.nwor_mode, c.scv_mode) == (nwor, scv)]
    return found


def of(nwor: str, scv: str, phase: str | None = None):
    """A test for a cell's records, for batches of one phase if one is named."""

    def matches(record) -> bool:
        same = (record.nwor_mode, record.scv_mode) == (nwor, scv)
        return same and (phase is None or record.phase == phase)

    return matches


TIMES = ("latency_ms_p50", "latency_ms_p95", "window_ms_mean", "tokens_per_s")
RATIOS = ("ratio_to_off", "ratio_ci_low", "ratio_ci_high")
STAGE, STAGE_GRAPH, SCV_ALONE = ("stage", "off"), ("stage", "graph"), ("off", "graph")


@pytest.fixture(scope="module")
def run() -> RunData:
    return make_run()


def test_cells_stand_in_a_fixed_order(run):
    modes = [(c.nwor_mode, c.scv_mode) for c in analyse(run).cells]
    scv = ["off", "graph", "adaptive"]
    assert modes == [("off", s) for s in scv] + [("stage", s) for s in scv]


def test_sums_are_those_of_the_timed_records(run):
    for result in analyse(run).cells:
        match = of(result.nwor_mode, result.scv_mode)
        batches = [b for b in run.batches if match(b) and b.phase == "timed"]
        windows = [w for w in run.windows if match(w) and w.block != 0]
        assert (result.batches, result.windows) == (6, len(windows))
        assert result.output_tokens == 128 * 6
        assert result.draft_tokens == sum(w.draft_tokens for w in windows)
        assert result.accepted_tokens == sum(w.accepted_tokens for w in windows)
        assert result.acceptance_rate == result.accepted_tokens / result.draft_tokens
        assert result.mean_accepted_per_window == result.accepted_tokens / len(windows)
        # Two requests, and each has a draft in every window.
        per_request = result.accepted_tokens / (2 * len(windows))
        assert result.acceptance_length == pytest.approx(1 + per_request)
        assert result.latency_ms_p50 == pytest.approx(median(b.latency_ms for b in batches))
        seconds = sum(b.latency_ms for b in batches) / 1000
        assert result.tokens_per_s == pytest.approx(128 * 6 / seconds)
        if result.nwor_mode == "stage":
            staged = sum(w.draft_tokens for w in windows if w.fallback_reason is None)
            assert result.nwor_total_staged == staged == result.nwor_unique_tokens
            assert result.nwor_total_committed + result.nwor_total_rejected == staged
            assert result.nwor_stage_operations == staged * LAYERS
            assert result.bytes_staged == staged * BYTES_PER_TOKEN
            assert result.fallbacks == {"mixed_batch": 6}
            assert result.nwor_fallback_count == 6


@pytest.mark.parametrize(
    ("device", "scv_status", "verdict"),
    [
        ("cuda", "ok", Verdict.AMBIGUOUS),
        ("cpu", "INEFFECTIVE", Verdict.INEFFECTIVE),  # the gate proves that it cannot fire
    ],
)
def test_what_was_not_measured_is_none_not_zero(device, scv_status, verdict):
    """The counts of a cell that was not timed are its gate batch's; times and ratios are none."""
    run = make_run(device=device)
    assert cell(run, "off", "off").bytes_staged is None
    gate_only = kept(run, lambda record: record.block == 0)
    result = cell(gate_only, "stage", "graph")
    assert (result.batches, result.scv_status) == (0, scv_status)
    for name in (*TIMES, *RATIOS):
        assert getattr(result, name) is None, name
    (gate,) = [b for b in run.batches if b.cell == result.cell and b.phase == Phase.GATE]
    assert (result.counts_from, result.windows) == ("gate", gate.windows)
    assert result.draft_tokens == gate.draft_tokens
    assert result.nwor_total_staged == gate.staged_tokens > 0
    assert cell(run, "off", "off").counts_from == "timed"
    assert (result.verdict, result.parity) == (verdict, "exact")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_run_that_only_checks_gives_no_verdict_on_time(device):
    run = kept(make_run(device=device), lambda record: record.block == 0)
    scenario = {**run.header.scenario, "batches": 0}
    run = replace(run, header=run.header.model_copy(update={"scenario": scenario}))
    assert cell(run, "stage", "off").verdict == Verdict.CHECKED
    planted = change_batches(run, of("stage", "off"), parity="INVALID", first_mismatch="token 3")
    assert cell(planted, "stage", "off").verdict == Verdict.INVALID
    unchecked = change_batches(run, of("stage", "off"), parity=None)
    assert cell(unchecked, "stage", "off").verdict == Verdict.AMBIGUOUS
    direct = dict.fromkeys(
        ("staged_tokens", "committed_tokens", "rejected_tokens", "stage_operations"), 0
    )
    nothing = change_windows(run, of("stage", "off"), **direct, fallback_reason="mixed_batch")
    nothing = change_batches(nothing, of("stage", "off"), staged_tokens=0, committed_tokens=0)
    assert cell(nothing, "stage", "off").verdict == Verdict.INEFFECTIVE


def test_per_position_rates_divide_by_the_drafts_there(run):
    for counts, rates, length in (
        (((4, 2, 1), (3, 1, 0)), (0.75, 0.5, 0.0), 2.0), (((), ()), (), None),
    ):  # fmt: skip
        planted = change_windows(
            kept(run, lambda record: record.block == 1), of("off", "off"),
            drafts_per_position=counts[0], accepted_per_position=counts[1],
        )  # fmt: skip
        result = cell(planted, "off", "off")
        assert (result.acceptance_per_position, result.acceptance_length) == (rates, length)
        assert result.acceptance_rate is not None


def test_a_window_of_only_finished_requests_hides_no_acceptance_length(run):
    """Seen on an H200: the last window's drafts were all of a request that had ended."""
    ended = next(w for w in run.windows if of("off", "off")(w) and w.block == 1)
    changed = replace(
        ended,
        drafts_per_position=(),
        accepted_per_position=(),
        uncounted_draft_tokens=ended.draft_tokens,
        uncounted_accepted_tokens=ended.accepted_tokens,
    )
    others = tuple(w for w in run.windows if w is not ended)
    found = cell(replace(run, windows=(*others, changed)), "off", "off")
    without = cell(replace(run, windows=others), "off", "off")
    assert found.acceptance_length == without.acceptance_length is not None
    assert found.acceptance_per_position == without.acceptance_per_position


def test_the_planted_slowdown_is_found(run):
    result, off = cell(run, *STAGE), cell(run, "off", "off")
    assert result.verdict == Verdict.SLOWER
    assert result.ratio_ci_low < 1.06 < result.ratio_ci_high
    assert result.ratio_to_off == pytest.approx(1.06, abs=0.005)
    assert (off.verdict, off.parity) == (REFERENCE, REFERENCE)
    assert [getattr(off, name) for name in RATIOS] == [None] * 3
    assert off.latency_ms_p50 is not None


def test_only_blocks_that_both_cells_ran_are_compared(run):
    lost = kept(run, lambda record: not of("stage", "off")(record) or record.block < 4)
    ours = {b.block: b.latency_ms for b in lost.batches if of("stage", "off", "timed")(b)}
    base = {b.block: b.latency_ms for b in lost.batches if of("off", "off", "timed")(b)}
    assert (len(ours), len(base)) == (3, 6)
    product = 1.0
    for block, latency in ours.items():
        product *= latency / base[block]
    assert cell(lost, "stage", "off").ratio_to_off == pytest.approx(product ** (1 / 3))


@pytest.mark.parametrize("phase", ["gate", "timed"])
def test_a_cell_that_breaks_parity_carries_no_time(run, phase):
    broken = change_batches(
        run, of("stage", "graph", phase), parity="INVALID", first_mismatch="request 1, token 3"
    )
    result = cell(broken, "stage", "graph")
    assert (result.verdict, result.parity) == (Verdict.INVALID, "INVALID")
    assert [getattr(result, name) for name in (*TIMES, *RATIOS)] == [None] * 7
    assert "request 1, token 3" in result.reason
    assert result.nwor_total_staged > 0
    assert cell(broken, "stage", "off").verdict == Verdict.SLOWER


@pytest.mark.parametrize(
    ("changed", "parity", "reason"),
    [
        (of("off", "off", "gate"), "INVALID", "off x off"),
        (of(*STAGE), None, "not checked"),
    ],
)
def test_without_a_checked_pair_there_is_no_verdict(run, changed, parity, reason):
    result = cell(change_batches(run, changed, parity=parity), *STAGE)
    assert (result.verdict, result.ratio_to_off) == (Verdict.AMBIGUOUS, None)
    assert reason in result.reason
    assert result.latency_ms_p50 is not None


def test_two_blocks_give_a_ratio_but_no_verdict():
    result = cell(make_run(blocks=2), "stage", "off")
    assert result.verdict == Verdict.AMBIGUOUS
    assert result.ratio_to_off is not None
    assert (result.ratio_ci_low, result.ratio_ci_high) == (None, None)
    assert "2" in result.reason


def test_scv_that_never_fired_spoils_only_its_own_verdict(run):
    alone, with_stage = cell(run, "off", "graph"), cell(run, "stage", "graph")
    assert alone.scv_status == with_stage.scv_status == "INEFFECTIVE"
    assert (alone.verdict, alone.ratio_to_off) == (Verdict.INEFFECTIVE, None)
    assert "no_cuda" in alone.reason
    assert with_stage.verdict == Verdict.SLOWER
    assert "NWOR result stands" in with_stage.reason
    assert with_stage.scv_fallbacks == {"no_cuda": with_stage.windows}


def test_scv_that_fired_is_judged_by_its_latency():
    run = make_run(device="cuda", blocks=8)
    result = cell(run, *SCV_ALONE)
    assert (result.scv_status, result.verdict) == ("ok", Verdict.SAME)
    assert (result.scv_graph_hits, result.scv_graph_captures) == (8 * 7, 8)
    for name, fallbacks, status in (
        ("scv_device_validations", 7, "ok"),
        ("scv_graph_hits", 0, "ok"),  # a cell that only replays has fired
        ("scv_graph_hits", 8, "INEFFECTIVE"),
    ):
        counters = {name: 8, "scv_fallback_count": fallbacks}
        changed = change_batches(run, of(*SCV_ALONE), scv_counters=counters)
        assert cell(changed, *SCV_ALONE).scv_status == status


@pytest.mark.parametrize("fault", ["rejected_tokens", "stage_operations", "staged_tokens"])
@pytest.mark.parametrize("block", [0, 2])
def test_one_bad_window_makes_its_cell_invalid(run, fault, block):
    def match(window):
        return of(*STAGE)(window) and (window.block, window.window) == (block, 5)

    bad = change_windows(run, match, **{fault: 9999})
    assert any("stage x off, block" in text and "window 5" in text for text in faults_of(bad))
    result = cell(bad, *STAGE)
    assert (result.verdict, result.tokens_per_s) == (Verdict.INVALID, None)
    assert cell(bad, *STAGE_GRAPH).verdict == Verdict.SLOWER
    assert faults_of(run) == []
    assert all(check.agrees for check in counter_checks(run))


RANKS = "window 3 has draft_tokens 7 on rank 1 and 8 on rank 0"


@pytest.mark.parametrize(
    ("modes", "field", "value", "text"),
    [
        (STAGE, "vllm_draft_tokens", 3, "draft tokens"),
        (STAGE, "vllm_accepted_tokens", 3, "accepted tokens"),
        (STAGE, "staged_tokens", 3, "staged tokens"),
        (STAGE, "committed_tokens", 3, "committed tokens"),
        (STAGE, "windows", 3, "windows"),
        (STAGE_GRAPH, "rank_disagreement", RANKS, f"{RANKS}."),
        (("off", "off"), "rank_disagreement", RANKS, f"{RANKS}."),
        (STAGE, "prompt_digest", "other", "prompts"),
    ],
)
def test_counts_that_differ_from_the_batch_or_vllm_are_violations(run, modes, field, value, text):
    bad = change_batches(run, lambda b: of(*modes)(b) and b.block == 4, **{field: value})
    assert text in faults_of(bad)[0]
    if field != "prompt_digest":
        assert len(faults_of(bad)) == 1
        assert cell(bad, *modes).verdict == Verdict.INVALID


def test_counters_that_were_not_read_are_no_violation(run):
    unread = change_batches(
        run, of("stage", "off"), vllm_draft_tokens=None, vllm_accepted_tokens=None
    )
    assert faults_of(unread) == []
    checks = [c for c in counter_checks(unread) if c.cell.label == "stage x off"]
    assert [(check.vllm, check.agrees) for check in checks] == [(None, None)] * 2


def test_windows_of_finished_requests_are_counted_apart(run):
    """Two drafts, one of them accepted, that vLLM does not count."""

    def last(record):
        return of("stage", "off")(record) and record.block == 2

    windows = [w for w in run.windows if last(w)]
    target = next(w for w in windows if w.staged_tokens >= 2 and w.committed_tokens >= 1)
    apart = change_windows(
        run, lambda w: w is target, uncounted_draft_tokens=2, uncounted_accepted_tokens=1
    )
    assert len(faults_of(apart)) == 2
    batch = next(b for b in run.batches if last(b))
    agreed = change_batches(
        apart,
        last,
        vllm_draft_tokens=batch.vllm_draft_tokens - 2,
        vllm_accepted_tokens=batch.vllm_accepted_tokens - 1,
    )
    assert faults_of(agreed) == []


def test_a_header_without_an_engine_still_summarises(run):
    """An engine that never told its layers: what needs them is left unchecked."""
    assert len(analyse(replace(run, header=header_of({"engine": None, "spec": None}))).cells) == 6
    assert analyse(RunData(header_of({}), (), ())).cells == ()


def test_windows_in_which_a_request_had_finished_are_not_full():
    run = make_run(blocks=3)
    chosen = [b for b in run.batches if b.phase == "timed" and b.cell.is_baseline]
    batch, other = chosen[:2]
    short = windows_by_batch(run)[batch_key(batch)][2]
    windows = tuple(replace(w, num_reqs=batch.requests - (w is short)) for w in run.windows)
    grouped = windows_by_batch(replace(run, windows=windows))
    full = full_windows([batch, other], grouped)
    everything = [*grouped[batch_key(batch)], *grouped[batch_key(other)]]
    assert full == [*everything[:2], *everything[3:]]
