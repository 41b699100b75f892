"""What is said of draft counts: the sentence, and the line for vLLM."""

from dataclasses import replace
from io import StringIO
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from said import PAIR, by_engines, rate, worth
from synthetic_run import make_run, with_header

from nwor_bench.analysis.analyse import Analysis, analyse
from nwor_bench.analysis.cell_data import CellData, idle_reason
from nwor_bench.analysis.groups import Pair
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.analysis.worth import Measured, WindowTime, window_times
from nwor_bench.errors import ExitCode
from nwor_bench.records.cell import AA, ADAPTIVE, Cell, Drafts, MethodCount, ScvMode
from nwor_bench.records.header import StoredSpec
from nwor_bench.records.types import NworMode, Phase, Verdict
from nwor_bench.report import worth as worth_page
from nwor_bench.report import worth_answer
from nwor_bench.report.document import Definitions, Document, Table
from nwor_bench.report.terminal import print_document
from nwor_bench.report.text import NOT_MEASURED
from nwor_bench.report.worth import worth_rows
from nwor_bench.report.worth_answer import label_of_count
from nwor_bench.stats.robust import from_ends

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
    expected = ("NOT MEASURED", ExitCode.OK) if drafted else ("INEFFECTIVE", ExitCode.INCONCLUSIVE)
    assert (said.badge, said.exit_code) == expected
    assert ("no draft token was proposed" in dict(said.facts).values()) != bool(drafted)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyse(make_run())


def test_synthetic_acceptance_is_said(analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    found = worth([rate(1, 2, 1.9, Verdict.FASTER)], {1: 2})
    monkeypatch.setattr(worth_answer, "named_rates", lambda _: {None: [0.75, 0.5]})
    facts = worth_answer.worth_answer(MeasuredWorth((analysis,), found, ())).facts
    assert dict(facts)["accepted"] == "synthetic: 75 % and 50 % of drafts 1 to 2"


def times(*windows: Any, refused: Any = None) -> list[WindowTime]:
    """Times by draft count of (drafts, mode, position, device, wall, forward) in runs of three."""
    own = [
        SimpleNamespace(cell=SimpleNamespace(fixed_drafts=k, nwor_mode=mode), group=0,
                        position=position, run_length=3, num_reqs=2, device_ms=device, wall_ms=wall,
                        forward_ms=forward, sample_ms=None)
        for k, mode, position, device, wall, forward in windows
    ]  # fmt: skip
    run: Any = SimpleNamespace(windows=own, header=SimpleNamespace(scenario={"requests": 2}))
    return list(window_times([Measured(run, (), refused or {})]))


OFF, STAGE = NworMode.OFF, NworMode.STAGE


def test_windows_take_the_devices_time_and_no_end_of_a_run_has_part_in_it() -> None:
    """On a GPU the host's time from step to step is that of another window. A staged run begins
    after a switch of modes, and its last window drafts for its own count."""
    found = times(
        (0, OFF, 1, 5.0, 9.0, 4.0), (2, OFF, 0, 90.0, 90.0, 9.0), (2, OFF, 1, 9.0, 5.0, 6.0),
        (2, OFF, 1, None, 7.0, 6.0), (2, OFF, 2, 80.0, 80.0, 9.0),
    )  # fmt: skip
    assert found == [WindowTime(2, 0, False, 5.0, 4.0), WindowTime(2, 2, False, 8.0, 6.0)]
    staged = ((2, STAGE, 0, None, 9.0, 4.0), (2, STAGE, 1, None, 5.0, 3.0),
              (2, STAGE, 2, None, 5.0, 3.0))  # fmt: skip
    assert times(*staged) == [WindowTime(2, 2, True, 5.0, 3.0)]
    assert times(*staged, refused={(2, True): "INVALID"}) == []


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


def test_acceptance_by_position_is_of_fixed_counts() -> None:
    """What adaptive verification accepts depends on the batch size."""
    pair, block = "tiny", 1
    analyses: Any = [SimpleNamespace(run=SimpleNamespace(
        header=SimpleNamespace(spec=StoredSpec(), scenario=None),
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


def test_each_count_is_a_row_of_worth_csv(analysis: Analysis) -> None:
    """Adaptive verification is told from the largest count, which it drafts too."""
    rates = [rate(1, 1, 1.1, Verdict.FASTER), rate(1, 2, 1.2, Verdict.FASTER),
             rate(1, 2, 1.4, Verdict.FASTER, adaptive=True)]  # fmt: skip
    found = MeasuredWorth((analysis,), worth(rates, {1: 2}), ())
    rows = [(row["drafts"], row["adaptive"], row["ratio"]) for row in worth_rows(found)]
    assert rows == [(1, False, 1.1), (2, False, 1.2), (2, True, 1.4)]


@pytest.mark.parametrize(("arms", "said"), [({"k=1": {}, "A/A": {}}, False), ({"k=1": {}}, True)])
def test_noise_of_one_engine_is_not_that_of_two(arms: dict[str, Any], said: bool) -> None:
    """Memory had no room for the A/A engine, so k = 0 was compared with the same engine."""
    run = analyse(with_header(make_run(), "engine", arms=arms))
    for several in (True, False):
        found = worth([rate(1, 1, 1.9, Verdict.FASTER)], {1: 1}, by_engines=several)
        blocks = worth_page.worth_section(MeasuredWorth((run,), found, ())).blocks
        assert (worth_page.ONE_ENGINE in blocks) == (said and several)


def test_each_group_of_engines_has_its_own_noise_and_plain_decoding() -> None:
    """The best method is of the first group; the server's figures are not the second's."""
    runs = []
    for name, k, plain in (("eagle", MethodCount("eagle", 1), 50.0), ("ngram", 0, 90.0)):
        cells = [SimpleNamespace(cell=Cell("tiny", OFF, ScvMode.OFF, Drafts(count)), batches=1,
                                 tokens_per_s=rate, ttft_ms_p50=8.0)
                 for count, rate in ((0, plain), (k, plain))]  # fmt: skip
        header = SimpleNamespace(scenario={"requests": 2}, spec=StoredSpec(engines_at_once=name))
        own = worth([], {}, noise={2: from_ends(plain / 50, 0.9, 2.0, 12)})
        runs.append(SimpleNamespace(cells=cells, run=SimpleNamespace(header=header), worth=own))
    measured: Any = MeasuredWorth(tuple(runs), worth([], {2: MethodCount("eagle", 1)}), ())  # type: ignore[arg-type]
    ((_, server),) = worth_page._server(measured)
    assert "(k = 0: 50, 8.0" in server
    (groups, _), *noise = worth_page._noise(measured)
    assert groups == "groups"
    said = [text for _, text in noise]
    assert [text.split(" [")[0] for text in said] == [
        "eagle: k = 0 over itself 1.00", "ngram: k = 0 over itself 1.80",
    ]  # fmt: skip


def test_a_method_that_was_not_measured_beside_another_is_told(analysis: Analysis) -> None:
    rates = [rate(size, 1, ratio, verdict, method=method) for method, size, ratio, verdict in (
        ("ngram", 1, 1.2, Verdict.FASTER), ("ngram", 4, 1.2, Verdict.FASTER),
        ("eagle", 1, None, Verdict.NOT_MEASURED), ("eagle", 4, 1.1, Verdict.FASTER),
    )]  # fmt: skip
    found = worth(rates, dict.fromkeys((1, 4), MethodCount("ngram", 1)))
    facts = worth_answer.worth_answer(MeasuredWorth((analysis,), found, ())).facts
    left = [text for term, text in facts if term == "left out"]
    assert left == ["eagle at 1 request: NOT MEASURED, too few blocks"]


def test_too_few_blocks_give_no_interval_in_the_sentence() -> None:
    """An interval of three may reach to 200,000."""
    unsure = rate(1, 1, 1.4, Verdict.AMBIGUOUS)
    for groups, told in ((4, "not known: 4 of the 5 groups or blocks"), (5, "shown to pay")):
        answer = worth_answer.worth_sentence(worth([replace(unsure, groups=groups)], {1: 0}))
        assert told in answer.headline.line
        assert ("95 %" in answer.headline.line) is (groups == 5)


def test_a_batch_size_whose_best_is_not_known_has_a_row_without_one(analysis: Analysis) -> None:
    """Tables of methods and of one method's counts; with a line of the other batch sizes."""
    for method in ("ngram", None):
        rates = [
            rate(size, 2, 2.1, verdict, method=method, groups=groups)
            for size, verdict, groups in ((1, Verdict.AMBIGUOUS, 3), (8, Verdict.FASTER, 5))
        ]
        best, arms = rates[1].count, {method: {"method": method}} if method else {}
        found = worth(rates, {8: best}, noise=dict.fromkeys((1, 8), from_ends(1.0, 0.9, 1.1, 5)))
        if method:
            found = replace(found, next_best={8: (0, from_ends(2.1, 2.0, 2.2, 5), Verdict.FASTER)})
        run = replace(analysis, run=with_header(analysis.run, "pair", method="ngram", arms=arms))
        screen = worth_page.worth_screen(MeasuredWorth((run,), found, ()))
        (one, eight) = next(block for block in screen if isinstance(block, Table)).rows
        assert (set(one[1:5]), eight[1]) == ({NOT_MEASURED}, str(best))
        (facts,) = (block for block in screen if isinstance(block, Definitions))
        said = dict(facts.entries)["undecided"]
        assert said.startswith(f"1 request: at best 2.10 so far, with {label_of_count(best)} (3 ")
        found = replace(found, rates=found.rates[:1], best={}, next_best={})
        screen = worth_page.worth_screen(MeasuredWorth((run,), found, ()))
        (only,) = (block for block in screen if isinstance(block, Table))
        assert ("Next method" in only.headers, len(only.rows)) == (method is not None, 1)


def test_engines_of_one_count_without_a_common_one_have_no_line() -> None:
    """No count has a ratio at both sizes: that is no reason to leave speculation out."""
    for common, lines in ((1, True), (None, False)):
        found = replace(by_engines(several=False), best_fixed=common)
        assert bool([*worth_answer.line_blocks(found, PAIR)]) is lines


def test_a_run_without_a_batch_size_names_none(analysis: Analysis) -> None:
    screen = worth_page.worth_screen(MeasuredWorth((analysis,), worth([], {}), ()))
    (facts,) = (block for block in screen if isinstance(block, Definitions))
    assert "requests" not in dict(facts.entries)["run"]


def test_six_batch_sizes_fit_a_terminal_of_24_lines() -> None:
    """On a GPU, with a count for each size, a drafter's pass in k = 0, noise and a warning."""
    best = {1: 4, 2: 4, 8: 3, 16: 2, 32: 2, 64: 1}
    rates = [rate(size, k, 1.05, Verdict.FASTER) for size, k in best.items()]
    noise = {size: from_ends(1.0, 0.98, 1.02, 12) for size in best}
    times = [WindowTime(size, k, False, 100.0, 80.0) for size in best for k in (0, 4)]
    run = with_header(make_run(blocks=2, aa=True, device="cuda"), "pair", method="eagle")
    found = MeasuredWorth((analyse(run),), worth(rates, best, noise=noise), tuple(times))
    blocks = worth_page.worth_screen(found)
    out = StringIO()
    head = worth_answer.worth_answer(found).headline
    print_document(Console(file=out, width=80), Document("", (head, *blocks)))
    lines = out.getvalue().splitlines()
    text = " ".join(" ".join(lines).split())
    assert "(2 more sizes in the report)" in text
    for words in ("but plain decoding", "noise k = 0 over itself", "warning ", "on a GPU"):
        assert words in text
    assert len(lines) <= 21, out.getvalue()  # and the server, the report's path, the prompt


def test_what_a_user_feels_beside_decoding_is_told(analysis: Analysis) -> None:
    """Tokens/s with prefill and TTFT of whole batches; nothing of cells that had none."""
    cells = [
        replace(analysis.cells[0], arm=str(Drafts(k)), tokens_per_s=rate_, ttft_ms_p50=ttft)
        for k, rate_, ttft in ((0, 374.0, 7.63), (2, 656.6, 7.04))
    ]
    found = worth([rate(4, 2, 1.9, Verdict.FASTER)], {4: 2})
    run = replace(analysis, run=with_header(analysis.run, "scenario", requests=4), cells=cells)
    measured = MeasuredWorth((run,), found, ())
    (told,) = worth_page._server(measured)
    words = "657 tokens/s with prefill, TTFT 7.0 ms (k = 0: 374, 7.6) at 4 requests"
    assert told == ("server", words)
    untimed = replace(run, cells=[replace(cell, batches=0) for cell in cells])
    assert not [*worth_page._server(MeasuredWorth((untimed,), found, ()))]
