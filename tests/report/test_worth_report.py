"""What is said of draft counts: the sentence, and the line for vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_run import make_run, with_header

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.cell_data import CellData, idle_reason
from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.analysis.groups import Pair
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.analysis.worth import Measured, WindowTime, window_times
from nwor_bench.errors import ExitCode
from nwor_bench.records.cell import AA, ADAPTIVE, Cell, Drafts, ScvMode
from nwor_bench.records.header import PairFacts
from nwor_bench.records.types import NworMode, Phase, Verdict
from nwor_bench.report import draft_line, worth_answer
from nwor_bench.report import worth as worth_page
from nwor_bench.report.document import Paragraph, Table
from nwor_bench.report.worth import rates_table, worth_rows
from nwor_bench.stats.robust import from_ends

pytestmark = pytest.mark.slow  # imports pandas and scipy


def rate(requests: int, k: int, ratio: float | None, verdict: Verdict) -> Rate:
    bounds = (None, None) if ratio is None else (ratio - 0.1, ratio + 0.1)
    return Rate(requests, k, ratio, *bounds, str(verdict), 1.0, 2.0, 5)


def worth(rates: Sequence[Rate], best: Mapping[int, int]) -> Worth:
    return Worth(tuple(rates), best, 5, {})


def told(found: Worth, times: Sequence[WindowTime] = ()) -> MeasuredWorth:
    """Of a run that has no draft counts of its own."""
    return MeasuredWorth((analyse(make_run()),), found, tuple(times))


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


FASTER, SLOWER, OPEN = Verdict.FASTER, Verdict.SLOWER, Verdict.AMBIGUOUS


@pytest.mark.parametrize(
    ("found", "badge", "words"),
    [
        (
            worth([rate(1, 2, 1.9, FASTER), rate(8, 2, 1.2, FASTER)], {1: 2, 8: 2}),
            FASTER,
            "Speculate up to 8 requests: 1.90 times the tokens/s of k = 0 at 1 request with k = 2, "
            "1.20 times at 8 requests with k = 2.",
        ),
        (
            worth([rate(1, 2, 1.9, FASTER), rate(8, 2, 0.9, OPEN)], {1: 2, 8: 0}),
            FASTER,
            "Speculate up to 1 request: 1.90 times the tokens/s of k = 0 at 1 request with k = 2; "
            "at 8 requests no draft count is shown to pay.",
        ),
        (
            worth([rate(1, 2, 0.9, OPEN), rate(8, 2, 1.9, FASTER)], {1: 0, 8: 2}),
            FASTER,
            "Speculate at 8 requests: 1.90 times the tokens/s of k = 0 at 8 requests with k = 2; "
            "at 1 request no draft count is shown to pay.",
        ),
        (
            worth([rate(1, 2, None, OPEN), rate(8, 2, 1.9, FASTER)], {8: 2}),
            FASTER,
            "Speculate at 8 requests: 1.90 times the tokens/s of k = 0 at 8 requests with k = 2; "
            "at 1 request nothing was measured.",
        ),
        (
            worth([rate(1, 2, 0.8, SLOWER), rate(8, 2, 0.7, SLOWER)], {1: 0, 8: 0}),
            SLOWER,
            "Do not speculate here: at best it gives 0.80 [0.70, 0.90] times the tokens/s of "
            "k = 0, at 1 request with k = 2.",
        ),
        (
            worth([rate(1, 2, 1.05, OPEN), rate(8, 2, 0.7, SLOWER)], {1: 0, 8: 0}),
            OPEN,
            "No draft count is shown to pay here. The best has 1.05 [0.95, 1.15] times the "
            "tokens/s of k = 0, at 1 request with k = 2.",
        ),
        (worth([rate(1, 2, None, OPEN)], {}), OPEN, None),
    ],
)
def test_the_sentence(found: Worth, badge: Verdict, words: str | None) -> None:
    answer = worth_answer.worth_answer(told(found))
    assert answer.badge == badge
    if words is None:
        assert "Measure longer" in answer.sentence
    else:
        assert answer.sentence == words


def test_a_gain_that_the_drafters_pass_at_k_0_may_explain() -> None:
    """1.1 to 1.3 times at 8 requests, where k = 0 spends up to 12 of 100 ms beside the target; 1.8
    to 2 times at 1."""
    found = worth([rate(1, 2, 1.9, FASTER), rate(8, 2, 1.2, FASTER)], {1: 2, 8: 2})
    times = [WindowTime(size, k, False, 100.0, 88.0) for size in (1, 8) for k in (0, 2)]
    sentence = worth_answer.worth_answer(told(found, times)).sentence
    assert "At 8 requests a server without a drafter may be as fast" in sentence
    assert "up to 12 % of its time" in sentence


def test_synthetic_acceptance_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = worth([rate(1, 2, 1.9, FASTER)], {1: 2})
    monkeypatch.setattr(worth_answer, "named_rates", lambda _: [0.75, 0.5])
    sentence = worth_answer.worth_answer(told(found)).sentence
    assert sentence.endswith(
        "Acceptance is synthetic: 75 % and 50 % of windows accept drafts 1 to 2."
    )


@pytest.mark.parametrize(("ratio", "said"), [(None, 0), (0.8, 1)])
def test_no_line_if_nothing_was_measured(ratio: float | None, said: int) -> None:
    found = worth([rate(1, 2, ratio, OPEN)], {1: 0} if ratio else {})
    assert len(list(draft_line.line_blocks(found, PAIR, staged=True))) == said


def test_a_shapes_acceptance_is_no_part_of_the_line() -> None:
    shape = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.6, "b": 2}
    pair = PairFacts(method="eagle", draft="/d", speculative=shape)
    found = draft_line.speculative_config([[1, 1, 2]], pair)
    assert found == {"b": 2, "method": "eagle", "model": "/d", "num_speculative_tokens": 2}


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


@pytest.mark.parametrize(
    ("staged", "blocks"),
    [({}, 0), ({1: 2, 8: 2}, 1), ({1: 0, 8: 0}, 1), ({1: 4, 8: 2}, 2)],
)
def test_a_server_that_stages_has_a_line_of_its_own(staged: Mapping[int, int], blocks: int) -> None:
    """Only if staged counts were measured: the same one, none, or another."""
    found = replace(worth([rate(1, 2, 1.9, FASTER)], {1: 2, 8: 2}), best_staged=staged)
    told = list(draft_line.line_blocks(found, PAIR, staged=True))
    assert len(told) == 2 + blocks
    assert len(list(draft_line.line_blocks(found, PAIR, staged=False))) == 2
    if blocks == 2:
        assert '"num_speculative_tokens": 4' in str(told[-1])


def test_a_broken_count_is_the_answer() -> None:
    sound = analyse(make_run())
    cells = tuple(
        replace(cell, verdict="INVALID", reason="it changed the output") for cell in sound.cells
    )
    broken = MeasuredWorth((replace(sound, cells=cells),), worth([], {}), ())
    answer = worth_answer.worth_answer(broken)
    assert answer.badge == "INVALID"
    assert "it changed the output" in answer.sentence


PAIR = PairFacts(method="eagle", draft="/d", speculative={"a": 1})


@pytest.mark.parametrize(
    ("best", "config"),
    [
        ({1: 0, 8: 0}, None),
        ({1: 3, 8: 3}, {"num_speculative_tokens": 3}),
        (
            {1: 3, 8: 1},
            {"num_speculative_tokens": 3,
             "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 8, 1]]},
        ),
    ],
)  # fmt: skip
def test_the_line_for_vllm(best: Mapping[int, int], config: dict[str, Any] | None) -> None:
    found = draft_line.speculative_config(worth([], best).schedule, PAIR)
    models = {"a": 1, "method": "eagle", "model": "/d"}
    assert found == (None if config is None else {**models, **config})


def adaptive(requests: int, ratio: float) -> Rate:
    return replace(rate(requests, 2, ratio, FASTER), adaptive=True)


@pytest.mark.parametrize(
    ("best", "captured", "asked"),
    [
        ({1: 3, 8: 3}, 640, None),  # one count, small windows
        ({1: 3, 8: 1}, 640, '{"cudagraph_mode": "FULL_DECODE_ONLY"}'),
        ({128: 4}, 640, '{"max_cudagraph_capture_size": 640}'),
        ({128: 4}, 512, None),  # measured without graphs
        ({1: 3, 130: 4}, 1024, '{"cudagraph_mode": "FULL_DECODE_ONLY", '
                               '"max_cudagraph_capture_size": 656}'),
    ],
)  # fmt: skip
def test_a_server_is_told_which_graphs_were_measured(
    best: Mapping[int, int], captured: int, asked: str | None
) -> None:
    rates = [rate(size, k, 1.9, FASTER) for size, k in best.items()]
    blocks = draft_line.line_blocks(worth(rates, best), PAIR, captured=captured)
    texts = [block.text for block in blocks if isinstance(block, Paragraph)]
    if asked is None:
        assert not [text for text in texts if "--compilation-config" in text]
    else:
        assert [text for text in texts if f"--compilation-config '{asked}'" in text]


def test_acceptance_by_position_is_of_fixed_counts() -> None:
    """What adaptive verification accepts depends on the batch size."""
    pair, block = "tiny", 1
    analyses: Any = [SimpleNamespace(run=SimpleNamespace(
        header=SimpleNamespace(spec={}),
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


def test_adaptive_verification_stands_beside_the_fixed_counts() -> None:
    """In the table and in a sentence of its own; whether speculation pays is said of fixed ones."""
    rates = [rate(1, 1, 0.8, SLOWER), rate(1, 2, 0.7, SLOWER), adaptive(1, 1.4)]
    found = worth(rates, {1: 0})
    rows = rates_table(replace(found, by_engines=True))
    assert [row[1] for row in rows.rows] == ["1", "2", "adaptive"]
    assert rows.headers[-1] == "Blocks"
    answer = worth_answer.worth_answer(told(found))
    assert answer.badge == SLOWER
    assert "at best it gives 0.80" in answer.sentence
    gives = "Adaptive verification gives, over the tokens/s of k = 0, 1.40 [1.30, 1.50] times at"
    assert f"{gives} 1 request." in answer.sentence


def test_each_count_is_a_row_of_worth_csv() -> None:
    """Adaptive verification is told from the largest count, which it drafts too."""
    found = told(
        worth([rate(1, 1, 1.1, FASTER), rate(1, 2, 1.2, FASTER), adaptive(1, 1.4)], {1: 2})
    )
    rows = [(row["drafts"], row["adaptive"], row["ratio"]) for row in worth_rows(found)]
    assert rows == [(1, False, 1.1), (2, False, 1.2), (2, True, 1.4)]


@pytest.mark.parametrize(
    ("by_engines", "config"),
    [
        (
            False,
            {"num_speculative_tokens": 2,
             "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 8, 1]]},
        ),
        (True, {"num_speculative_tokens": 1}),
    ],
)  # fmt: skip
def test_engines_of_one_count_have_one_in_the_line(
    by_engines: bool, config: dict[str, Any]
) -> None:
    """k = 2 at 1 request, k = 1 at 8, and k = 1 for all."""
    rates = [rate(1, 1, 1.3, FASTER), rate(1, 2, 1.5, FASTER), adaptive(1, 9.0),
             rate(8, 1, 1.2, FASTER), rate(8, 2, 0.9, SLOWER), adaptive(8, 9.0)]  # fmt: skip
    found = replace(worth(rates, {1: 2, 8: 1}), by_engines=by_engines, best_fixed=1)
    pair = PairFacts(method="eagle")
    assert draft_line.line_config(found, pair) == {"method": "eagle", **config}
    said = str(list(draft_line.line_blocks(found, pair)))
    assert ("Every engine had one draft count" in said) == by_engines
    assert ("--compilation-config" in said) == (not by_engines)


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


def test_the_noise_stands_beside_the_table() -> None:
    found = replace(
        worth([rate(8, 1, 1.44, OPEN)], {8: 0}), noise={8: from_ends(0.78, 0.62, 0.99, 12)}
    )
    table, noise, *_ = worth_page.worth_blocks(told(found))
    assert isinstance(table, Table)
    assert noise == Paragraph(
        "Noise, the time of k = 0 over itself: 0.78 [0.62, 0.99] at 8 requests."
    )
