"""What is said of draft counts: the sentence, and the line for vLLM."""

from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
from said import rate, worth
from synthetic_run import make_run, with_header

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.cell_data import CellData, idle_reason
from nwor_bench.analysis.draft_rates import Worth
from nwor_bench.analysis.groups import Pair
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.analysis.worth import Measured, WindowTime, window_times
from nwor_bench.errors import ExitCode
from nwor_bench.records.cell import AA, ADAPTIVE, Cell, Drafts, ScvMode
from nwor_bench.records.header import StoredSpec
from nwor_bench.records.types import NworMode, Phase, Verdict
from nwor_bench.report import worth as worth_page
from nwor_bench.report import worth_answer
from nwor_bench.report.worth import worth_rows

pytestmark = pytest.mark.slow  # imports pandas and scipy


@pytest.mark.parametrize("drafted", [0, 1])
def test_draft_counts_of_which_none_drafted_are_no_answer(drafted: int) -> None:
    found = analyse(make_run())
    own = [replace(found.cells[0], arm=str(Drafts(0)), verdict="reference")]
    for k in (1, 2):
        gate = replace(found.run.batches[0], draft_tokens=drafted * (k == 2))
        data = CellData(Cell("toy", NworMode.OFF, ScvMode.OFF, Drafts(k)), [gate], [], [])
        why = idle_reason(data)
        assert why == (None if drafted and k == 2 else "no draft token was proposed")
        verdict = "INEFFECTIVE" if why else "AMBIGUOUS"
        own.append(replace(own[0], arm=str(Drafts(k)), verdict=verdict, reason=why))
    measured = MeasuredWorth((replace(found, cells=tuple(own)),), worth([], {}), ())
    said = worth_answer.worth_answer(measured)
    expected = ("AMBIGUOUS", ExitCode.OK) if drafted else ("INEFFECTIVE", ExitCode.INCONCLUSIVE)
    assert (said.badge, said.exit_code) == expected
    assert ("no draft token was proposed" in said.sentence) != bool(drafted)


FASTER = Verdict.FASTER


def told(found: Worth) -> MeasuredWorth:
    """Measured worth of a run that has no draft counts of its own."""
    return MeasuredWorth((analyse(make_run()),), found, ())


def test_synthetic_acceptance_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = worth([rate(1, 2, 1.9, FASTER)], {1: 2})
    monkeypatch.setattr(worth_answer, "named_rates", lambda _: [0.75, 0.5])
    sentence = worth_answer.worth_answer(told(found)).sentence
    assert sentence.endswith(
        "Acceptance is synthetic: 75 % and 50 % of windows accept drafts 1 to 2."
    )


def window(cell: Any, device: float | None, wall: float, forward: float) -> Any:
    return SimpleNamespace(cell=cell, group=0, position=0, run_length=2, num_reqs=2,
                           device_ms=device, wall_ms=wall, forward_ms=forward,
                           sample_ms=None)  # fmt: skip


def test_windows_take_the_devices_time_if_there_is_one() -> None:
    """On a GPU the host's time from step to step is that of another window."""
    counts = [SimpleNamespace(drafts=k, nwor_mode=NworMode.OFF) for k in (0, 2)]
    windows = [window(counts[0], 5.0, 9.0, 4.0), window(counts[1], 9.0, 5.0, 6.0),
               window(counts[1], None, 7.0, 6.0)]  # fmt: skip
    run: Any = SimpleNamespace(windows=windows, header=SimpleNamespace(scenario={"requests": 2}))
    found = window_times([Measured(run, ())])
    times = [(time.drafts, time.window_ms, time.target_ms) for time in found]
    assert times == [(0, 5.0, 4.0), (2, 8.0, 6.0)]


def test_windows_at_the_ends_of_a_run_have_no_part_in_its_time() -> None:
    count = SimpleNamespace(drafts=2, nwor_mode=NworMode.OFF)
    windows = [window(count, ms, 1.0, 2.0) for ms in (9.0, 5.0, 8.0)]
    for place, own in enumerate(windows):
        own.position, own.run_length = place, 3
    run: Any = SimpleNamespace(windows=windows, header=SimpleNamespace(scenario={"requests": 2}))
    assert [time.window_ms for time in window_times([Measured(run, ())])] == [5.0]


def test_the_cost_of_a_change_of_k_is_told() -> None:
    def effects(arm: str, cost: float, groups: int) -> Any:
        pair = Pair(Cell("tiny", NworMode.OFF, ScvMode.OFF, Drafts(0)),
                    Cell("tiny", NworMode.OFF, ScvMode.OFF, arm))  # fmt: skip
        own = SimpleNamespace(pair=pair, switch=cost, run_length=3)
        return SimpleNamespace(pair=pair, groups=[own] * groups)

    changed, same = effects(Drafts(2), log(1.05), 12), effects(AA, 0.0, 12)
    (both,), (one,) = (list(worth_page._switch_note(own)) for own in ([changed, same], [changed]))
    assert one.text == (
        "The first window after a change of k is left out: it took 1.0500 [1.0500, 1.0500] times "
        "as long as the next."
    )
    assert both.text == (
        f"{one.text} If k = 0 follows k = 0, it took 1.0000 [1.0000, 1.0000] times as long."
    )
    assert list(worth_page._switch_note([effects(Drafts(2), 0.1, 3)])) == []


def test_staged_windows_have_times_of_their_own() -> None:
    """The first window of a run follows the switch of modes; the last one drafts for its count."""
    staged = SimpleNamespace(drafts=2, nwor_mode=NworMode.STAGE)
    windows = [window(staged, None, 9.0, 4.0), window(staged, None, 5.0, 3.0)]
    windows[1].position = 1
    run: Any = SimpleNamespace(windows=windows, header=SimpleNamespace(scenario={"requests": 2}))
    assert window_times([Measured(run, ())]) == [WindowTime(2, 2, True, 5.0, 3.0)]
    assert window_times([Measured(run, (), {(2, True): "INVALID"})]) == []


def test_acceptance_by_position_is_of_fixed_counts() -> None:
    """What adaptive verification accepts depends on the batch size."""
    pair, block = "tiny", 1
    analyses: Any = [SimpleNamespace(run=SimpleNamespace(
        header=SimpleNamespace(spec=StoredSpec()),
        batches=[
            SimpleNamespace(pair=pair, block=block, batch=number, phase=Phase.TIMED,
                            cell=Cell(pair, NworMode.OFF, ScvMode.OFF, Drafts(k)))
            for number, k in enumerate((1, 2, ADAPTIVE))
        ],
        windows=[
            SimpleNamespace(pair=pair, block=block, batch=number, drafts_per_position=(1,) * drafts,
                            accepted_per_position=(1,) * drafts)
            for number, drafts in enumerate((1, 2, 2))
        ],
    ))]  # fmt: skip
    assert [row[0] for row in worth_page._acceptance(analyses).rows] == ["1", "2"]


def test_each_count_is_a_row_of_worth_csv() -> None:
    """Adaptive verification is told from the largest count, which it drafts too."""
    found = told(
        worth(
            [
                rate(1, 1, 1.1, FASTER),
                rate(1, 2, 1.2, FASTER),
                rate(1, 2, 1.4, FASTER, adaptive=True),
            ],
            {1: 2},
        )
    )
    rows = [(row["drafts"], row["adaptive"], row["ratio"]) for row in worth_rows(found)]
    assert rows == [(1, False, 1.1), (2, False, 1.2), (2, True, 1.4)]


@pytest.mark.parametrize(("arms", "said"), [({"k=1": {}, "A/A": {}}, False), ({"k=1": {}}, True)])
def test_noise_of_one_engine_is_not_that_of_two(arms: dict[str, Any], said: bool) -> None:
    """Memory had no room for the A/A engine, so k = 0 was compared with the same engine."""
    run = with_header(make_run(), "engine", arms=arms)
    found = replace(worth([rate(1, 1, 1.9, FASTER)], {1: 1}), by_engines=True)
    blocks = worth_page.worth_blocks(MeasuredWorth((analyse(run),), found, ()))
    assert (worth_page.ONE_ENGINE in blocks) == said
    blocks = worth_page.worth_blocks(
        MeasuredWorth((analyse(run),), replace(found, by_engines=False), ())
    )
    assert worth_page.ONE_ENGINE not in blocks
