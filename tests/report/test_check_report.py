"""What `nwor-bench check` says of made-up runs; tests/golden/said/check.md has the texts."""

from dataclasses import replace
from pathlib import Path

import pytest
from check_runs import FAR, TIE, K, check_run, checked, failed, unsteady, with_places
from swept_folder import save_sweep
from synthetic_run import change_batches, change_windows, kept, with_header, with_parts

from nwor_bench.analysis.check import CheckVerdict, causes, check_of
from nwor_bench.cli.commands.report import _report_sweep
from nwor_bench.errors import ExitCode
from nwor_bench.records.store import RunData
from nwor_bench.report.check import check_answer
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.run_report import answer_of, build_document, exit_code_of
from nwor_bench.report.sweep import swept_worths
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.run.sweep_summary import sweep_result, swept_runs

pytestmark = pytest.mark.slow  # imports pandas and scipy

RIGHT, TIES, NOT_CHECKED, WRONG = CheckVerdict
OK, BROKEN, OPEN = ExitCode.OK, ExitCode.CORRECTNESS_BROKEN, ExitCode.INCONCLUSIVE
NONE_DRAFTED = change_windows(
    change_batches(check_run(), lambda b: b.arm == str(K), draft_tokens=0, accepted_tokens=0),
    lambda w: w.arm == str(K),
    draft_tokens=0,
    accepted_tokens=0,
)


@pytest.mark.parametrize(
    ("run", "verdict", "code"),
    [
        (check_run(), RIGHT, OK),
        (with_places(check_run(parity="explained"), TIE), TIES, OK),
        (with_places(check_run(parity="INVALID"), FAR, TIE), WRONG, BROKEN),
        (unsteady(check_run()), NOT_CHECKED, OPEN),
        (unsteady(check_run(parity="INVALID")), NOT_CHECKED, OPEN),
        (check_run(parity="acceptance only"), NOT_CHECKED, OPEN),
        (check_run(parity=None), NOT_CHECKED, OPEN),
        (failed(check_run(), "RuntimeError: sizes"), NOT_CHECKED, OPEN),
        (kept(failed(check_run(), "vLLM did not start"), lambda r: False), NOT_CHECKED, OPEN),
        (NONE_DRAFTED, NOT_CHECKED, OPEN),
    ],
    ids=["right", "ties", "wrong", "A/A differs", "both differ", "synthetic", "not compared",
         "died", "not started", "no drafts"],
)  # fmt: skip
def test_each_verdict_has_its_exit_code(run: RunData, verdict: str, code: ExitCode) -> None:
    analysis = checked(run)
    found = check_of([analysis])
    assert found.worst.verdict is verdict
    assert (answer_of(analysis).badge, exit_code_of(analysis)) == (verdict, code)
    assert (found.worst.why is None) == (verdict in (RIGHT, TIES))
    assert (found.worst.tokens is None) == (verdict is NOT_CHECKED)


def test_a_wrong_count_beside_a_right_one_is_wrong() -> None:
    """`check` has one count; a sweep file may ask for several."""
    right = checked(check_run())
    wrong = [replace(cell, arm="k=5", parity="INVALID") for cell in right.cells if cell.cell.drafts]
    assert check_of([replace(right, cells=(*right.cells, *wrong))]).worst.verdict is WRONG


def test_the_worst_size_decides() -> None:
    """NOT CHECKED hides RIGHT, and WRONG hides both."""
    right, dead = check_run(8), failed(check_run(4), "dead")
    wrong = with_places(check_run(1, parity="INVALID"), FAR)
    both = check_of([checked(right), checked(dead)])
    assert [own.requests for own in both.sizes] == [4, 8]
    assert both.worst.verdict is NOT_CHECKED
    every = check_of([checked(run) for run in (right, dead, wrong)])
    assert every.worst.requests == 1
    assert check_answer(every).exit_code is BROKEN
    first = every.to_dict()["sizes"][0]["places"][0]
    assert (first["prompt"], first["token"], first["gap"]) == ("chat-0", 62, 0.312)


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (check_run(arms={str(K): {"drafter_max_model_len": 128}}), ["at most 128 tokens"]),
        (check_run(arms={str(K): {"drafter_max_model_len": 1024}}), []),
        (change_windows(check_run(), lambda w: w.arm == str(K), accepted_per_position=(0,) * 4),
         ["0.0 % of first drafts"]),
        (check_run(state_slots=5), []),
        (failed(check_run(state_slots=5), "dead"), ["prompt lookup on a hybrid"]),
        (failed(check_run(state_slots=5, device="cuda:0"), "dead"), []),
        (failed(check_run(), "dead"), []),
        (with_header(failed(check_run(state_slots=5, device="cuda:0"), "dead"), "spec",
                     engine_args={"enable_prefix_caching": True}), ["prefix caching beside"]),
    ],
)  # fmt: skip
def test_known_causes_are_named_only_where_they_apply(run: RunData, named: list[str]) -> None:
    found = list(causes(check_of([checked(run)])))
    assert len(found) == len(named)
    assert all(words in cause for words, cause in zip(named, found, strict=True))


def test_a_cause_of_all_sizes_is_named_once() -> None:
    """The longest request differs; one size without a draft accepted is chance."""
    short = {"arms": {str(K): {"drafter_max_model_len": 128}}}
    runs = [check_run(4, **short), with_parts(check_run(1, **short), gate={"longest_prompt": 9})]
    (told,) = causes(check_of(list(map(checked, runs))))
    assert "at most 128 tokens" in told
    none = change_windows(check_run(1), lambda w: w.arm == str(K), accepted_per_position=(0,) * 4)
    assert not [*causes(check_of([checked(check_run(4)), checked(none)]))]


def test_the_report_of_a_check_has_no_word_of_nwor_cells() -> None:
    """Nor the glossary of `sweep`."""
    wrong = checked(with_places(check_run(1, "INVALID"), FAR))
    page = render_markdown(build_document(wrong))
    assert "WRONG" in page
    assert "output token 2 of request 0 is 62, plain decoding gives 215" in page
    assert not [word for word in ("off x off", "INVALID", "Staged", "SCV") if word in page]


def test_a_timed_run_of_engines_is_no_check() -> None:
    timed = with_header(check_run(), "scenario", batches=3)
    assert not timed.header.checks_speculation
    assert not replace(check_run(), header=timed.header).header.checks_speculation
    assert check_run().header.checks_speculation


def test_a_folder_of_checks_has_one_answer(tmp_path: Path) -> None:
    """No table of draft counts that pay; a size that never ran is NOT CHECKED."""
    places = [{"requests": n, "dtype": "float32"} for n in (4, 1, 16)]
    runs = [check_run(4), with_places(check_run(1, "INVALID"), FAR), None]
    folder = save_sweep(tmp_path / "check", list(zip(places, runs, strict=True)), name="check")
    index = SweepIndex.open(folder)
    swept = swept_runs(index)
    assert swept_worths(swept) == {}
    result = sweep_result(index, swept, {})
    assert result["answer"]["badge"] == result["check"]["verdict"] == WRONG
    verdicts = {own["requests"]: own["verdict"] for own in result["check"]["sizes"]}
    assert verdicts == {1: WRONG, 4: RIGHT, 16: NOT_CHECKED}
    assert "worth" not in result
    assert _report_sweep(folder, RunOptions(quiet=True)) == BROKEN
    assert "vLLM did not start: no luck" in (folder / "summary.md").read_text()
