"""The answer and the questions after it: right for each kind of run."""

import re
from dataclasses import replace

import pytest
from report_runs import RUNS, ambiguous, faster, gpu_run, ineffective, invalid
from synthetic_run import analysed, change_batches, kept, summarised, with_parts

from nwor_bench.analysis.analyse import noise_floor
from nwor_bench.records.facts import CudaGraphs
from nwor_bench.records.header import ParityFacts
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult
from nwor_bench.report.answer import answer
from nwor_bench.report.questions import questions
from nwor_bench.report.text import change_range, compared_time, signed, sure_rates

pytestmark = pytest.mark.slow  # whole runs


def told(run: RunData) -> dict[str, str]:
    return dict(questions(analysed(run)).entries)


def named(cells: list[CellResult], label: str) -> CellResult:
    return next(cell for cell in cells if cell.label == label)


@pytest.mark.parametrize(
    ("name", "badge", "sentence", "sure", "then"),
    [
        ("faster", "FASTER", "with stage x graph: NWOR pays here (TPOT",
         "Sure of the direction", "switch it on"),
        ("slower", "SLOWER", ": NWOR does not pay here, it costs time even at its best (",
         "Sure of the direction", "Leave NWOR off"),
        ("same", "SAME", ": NWOR does not pay here, it makes no difference",
         "Sure that any effect is within", "Leave NWOR off"),
        ("ambiguous", "AMBIGUOUS", ": this run does not show whether NWOR pays (",
         "Not sure enough", "Measure longer"),
        ("invalid", "INVALID",
         "NWOR pays is not known, because the setting stage x graph failed its checks: it changed",
         "a fact, not noise", "Do not switch it on"),
        ("ineffective", "NOTHING STAGED", "NWOR never did anything in this run",
         "Sure that it never ran", "Find the reason"),
        ("cpu", "CPU RUN", "does not show whether NWOR pays",
         "nothing is known of the speed on a GPU", "on the GPU that you serve with"),
    ],
)  # fmt: skip
def test_each_kind_of_run_is_answered(name, badge, sentence, sure, then):
    run = RUNS[name]()
    found, said = answer(run.header, summarised(run)), told(run)
    assert found.badge == badge
    assert sentence in found.sentence
    assert found.sentence.count(". ") == 0
    assert sure in said["How sure is that?"]
    assert then in said["What next?"]
    assert list(said) == ["How sure is that?", "Is the output the same?", "What next?"]


def test_a_choice_of_stock_is_told_with_the_times_it_rests_on():
    run = ineffective("slower_than_stock")
    requests, drafts = (run.header.scenario[key] for key in ("requests", "draft_tokens"))
    times = {"context": [100, 200], "stock": [20.0, 30.0], "ours": [1.0, 41.4], "merge": [1.0, 42]}
    graphs = CudaGraphs(attention_us={f"{requests}x{drafts + 1}": {"8/2x64": times}})
    engine = run.header.engine.model_copy(update={"cuda_graphs": graphs})
    header = run.header.model_copy(update={"engine": engine})
    run = replace(run, header=header)
    found, said = answer(header, summarised(run)), told(run)
    assert found.badge == "INEFFECTIVE"
    assert "does not pay here, so every window was written as stock does" in found.sentence
    assert "stock 30 us at 200 tokens of context, and what stages at least 41 us" in found.sentence
    assert said["What next?"].startswith("Nothing is to be done: NWOR leaves such windows to stock")


@pytest.mark.parametrize("name", ["invalid", "ineffective", "cpu"])
def test_no_effect_is_named_if_none_counts(name):
    run = RUNS[name]()
    texts = [answer(run.header, summarised(run)).sentence, *told(run).values()]
    assert not re.search(r"\d %", " ".join(texts))


def test_the_answer_names_the_best_cell_its_effect_and_its_interval():
    run = faster()
    cells = summarised(run)
    best = named(cells, "stage x graph")
    assert best.ratio_to_off == min(c.ratio_to_off for c in cells if c.ratio_to_off is not None)
    low, high = best.ratio_simultaneous_low, best.ratio_simultaneous_high
    assert low < best.ratio_ci_low < best.ratio_ci_high < high < 1
    time = f"time of a window {signed(best.ratio_to_off, (low, high))}"
    rate = signed(best.tokens_per_s_ratio, sure_rates(best), "tokens/s")
    sentence = answer(run.header, cells).sentence
    assert sentence.startswith(f"{rate} with stage x graph: NWOR pays here (TPOT -2.")
    assert f"; {time}; 95 % intervals, corrected for 5 compared cells)" in sentence


@pytest.mark.parametrize(
    ("noise", "why"),
    [("acceptance", "accepted drafts differ by chance"), ("time", "the host's times scatter")],
)
def test_undecided_tokens_are_said_to_be_with_their_reason(noise, why):
    run = faster()
    cells = [
        replace(cell, tokens_per_s_ratio_simultaneous_low=0.998, tokens_per_s_noise=noise)
        for cell in summarised(run)
    ]
    found = answer(run.header, cells)
    assert found.badge == "FASTER"
    assert f" with stage x graph, undecided because {why}: NWOR pays here (" in found.sentence
    assert "undecided" not in answer(run.header, summarised(run)).sentence


def test_without_tokens_the_answer_begins_with_the_time():
    run = faster()
    cells = [replace(cell, tokens_per_s_ratio=None) for cell in summarised(run)]
    sentence = answer(run.header, cells).sentence
    assert sentence.startswith("time of a window -2.")
    assert "TPOT" not in sentence
    assert sentence.count("time of a window") == 1


def test_synthetic_acceptance_is_said_in_the_answer():
    run = faster()
    cells = [replace(cell, parity="acceptance only") for cell in summarised(run)]
    assert answer(run.header, cells).sentence.endswith("; synthetic acceptance).")
    assert "synthetic" not in answer(run.header, summarised(run)).sentence


def test_one_compared_cell_needs_no_correction():
    run = faster()
    two = {("off", "off"), ("stage", "graph")}
    run = kept(run, lambda record: (record.nwor_mode, record.scv_mode) in two)
    best = named(summarised(run), "stage x graph")
    assert best.ratio_simultaneous_low == pytest.approx(best.ratio_ci_low, rel=1e-12)
    assert best.ratio_simultaneous_high == pytest.approx(best.ratio_ci_high, rel=1e-12)
    sentence = answer(run.header, summarised(run)).sentence
    assert sentence.endswith("; 95 % intervals).")
    assert "corrected" not in " ".join([sentence, *told(run).values()])


def chosen_among_two(first: float, second: float) -> list[CellResult]:
    """Two FASTER cells by ratio; the first's interval for all cells holds 1, the second's not."""
    cells = summarised(faster())
    both = {"stage x off": (first, 1.001), "stage x graph": (second, 0.999)}
    return [
        replace(
            cell,
            verdict="FASTER",
            ratio_to_off=both[cell.label][0],
            ratio_ci_low=0.9,
            ratio_ci_high=0.9985,
            ratio_simultaneous_low=0.89,
            ratio_simultaneous_high=both[cell.label][1],
        )
        if cell.label in both
        else replace(cell, ratio_to_off=0.9995, verdict="SAME")
        if cell.ratio_to_off is not None
        else cell
        for cell in cells
    ]


def test_the_best_is_taken_of_the_cells_that_are_faster_for_all_at_once():
    cells = chosen_among_two(0.94, 0.95)
    found = answer(faster().header, cells)
    assert found.cell.label == "stage x graph"
    assert "time of a window -5.0 % [-11.0, -0.1]" in found.sentence


def test_a_best_cell_that_is_sure_only_by_holm_is_said_to_be():
    cells = [cell for cell in chosen_among_two(0.94, 0.95) if cell.label != "stage x graph"]
    found = answer(faster().header, cells)
    assert (found.badge, found.cell.label) == ("FASTER", "stage x off")
    assert "time of a window -6.0 % [-11.0, 0.1]" in found.sentence
    assert "only Holm's correction shows that there is a difference" in found.sentence
    said = dict(questions(analysed(faster(), cells)).entries)["How sure is that?"]
    assert "excludes" not in said


def test_an_undecided_answer_gives_both_ends():
    run = ambiguous()
    cells = summarised(run)
    found = answer(run.header, cells)
    assert found.cell.ratio_ci_low < 1 < found.cell.ratio_ci_high
    assert re.search(r"time of a window -[\d.]+ % \[-[\d.]+, [\d.]+\]; 95 %", found.sentence)
    assert f"{100 * found.cell.smallest_effect:.2f} % or more" in told(run)["What next?"]


def test_one_wrong_cell_makes_the_run_invalid_whatever_the_others_gained():
    run = invalid()
    verdicts = {cell.label: cell.verdict for cell in summarised(run)}
    assert verdicts["stage x off"] == "FASTER"
    said = told(run)
    assert "stage x off (FASTER)" in said["What next?"]
    assert "fix the fault before using them" in said["What next?"]
    assert said["Is the output the same?"].startswith("No: stage x graph changed it.")
    assert "output token 17" in answer(run.header, summarised(run)).sentence


def test_an_untrustworthy_baseline_leaves_nothing_to_compare():
    run = change_batches(
        faster(), lambda b: b.arm is not None and b.phase == "gate", parity="INVALID"
    )
    sentence = answer(run.header, summarised(run)).sentence
    assert sentence.startswith("Nothing can be compared, because off x off itself")


def test_the_noise_is_reported_with_the_answer():
    run = faster()
    found = noise_floor(summarised(run))
    assert change_range(found["low"], found["high"]) in told(run)["How sure is that?"]
    without = kept(run, lambda record: record.arm is None)
    assert "The machine's noise is not known" in told(without)["How sure is that?"]


def test_only_scv_is_asked_about_if_nothing_stages():
    off = kept(gpu_run(), lambda record: record.nwor_mode == "off")
    assert "SCV does not pay here" in answer(off.header, summarised(off)).sentence
    alone = kept(off, lambda record: record.scv_mode == "off")
    assert "nothing to compare" in answer(alone.header, summarised(alone)).sentence
    assert "Nothing was measured" in answer({}, []).sentence


def test_ties_are_said_to_be_ties():
    run = change_batches(
        faster(), lambda b: b.nwor_mode == "stage" and b.phase == "gate", parity="explained"
    )
    assert told(run)["Is the output the same?"].startswith("Yes, except at ties:")
    facts = {"largest_gap_nats": 0.0625, "allowance_nats": 0.1254}
    header = run.header.model_copy(update={"parity": ParityFacts(ties=facts)})
    found = told(replace(run, header=header))["Is the output the same?"]
    assert "Largest gap 0.062 nats, a tie is at most 0.13." in found


def test_an_unchecked_output_is_said_to_be():
    run = change_batches(faster(), lambda b: b.nwor_mode == "stage", parity=None)
    assert told(run)["Is the output the same?"].startswith("Not checked for stage x off")


def test_a_partial_run_is_to_be_finished():
    run = faster()
    partial = with_parts(run, status="partial")
    assert told(partial)["What next?"].startswith("Finish the run: nwor-bench sweep --resume")


def test_more_blocks_are_advised_by_the_square_of_the_effect():
    run = gpu_run({"off": 1.0, "graph": 1.0, "adaptive": 1.0}, noise=0.012, blocks=8)
    cells = summarised(run)
    cell = answer(run.header, cells).cell
    wanted = int(re.search(r"--batches (\d+)", told(run)["What next?"]).group(1))
    assert wanted == pytest.approx((cell.smallest_effect / 0.01) ** 2 * 8, abs=1)
    hopeless = gpu_run(noise=0.3, blocks=8)
    assert "find out what disturbs the machine" in told(hopeless)["What next?"]


@pytest.mark.parametrize(
    ("ratio", "bounds", "text"),
    [
        (1.029, (1.027, 1.0311), "+2.9 % x [2.7, 3.1]"),
        (0.972, (0.971, 0.973), "-2.80 % x [-2.90, -2.70]"),
        (1.0043, (0.997, 1.0116), "+0.43 % x [-0.30, 1.16]"),
        (0.5, None, "-50.0 % x"),
    ],
)
def test_signed_changes_have_digits_that_fit(ratio, bounds, text):
    assert signed(ratio, bounds, "x") == text


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((0.976, 0.982), "1.8 % to 2.4 % less"),
        ((1.048, 1.051), "4.8 % to 5.1 % more"),
        ((0.99, 1.02), "anywhere from 1.0 % less to 2.0 % more"),
    ],
)
def test_intervals_read_as_ranges(ends, text):
    assert change_range(*ends) == text


def test_batches_are_not_called_windows():
    run = faster()
    windows = tuple(replace(window, wall_ms=None) for window in run.windows)
    cells = summarised(replace(run, windows=windows))
    assert compared_time(cells) == "time per batch"
    assert "; time of a batch -2." in answer(run.header, cells).sentence
