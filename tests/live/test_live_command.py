"""`nwor-bench live` against a small server: what it says, when it ends, with which exit code.

Whole answers are held by test_live_golden.py.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from documented_keys import lacking, top_level
from pages import (
    COSTS,
    DRAFTS,
    FASTER,
    OTHERS,
    PAYS,
    SAME,
    SLOWER,
    UNSURE,
    Ratio,
    drafts_page,
    known,
    modes_page,
    serving,
)

from nwor_bench.errors import ExitCode
from nwor_bench.instruments.draft_counts import MAX_KEPT
from nwor_bench.live import watch as watching
from nwor_bench.live.reading import (
    STALE_AFTER_S,
    Reading,
    Unreachable,
    metrics_address,
    reading_of,
)
from nwor_bench.live.text import progress_line
from nwor_bench.live.watch import FIRST_LOOK, GONE_AFTER_S, Ended, Wanted, watch
from nwor_bench.records.fallback_reasons import IN_WORDS, Guard, LeftOut, in_words
from nwor_bench.records.window_order import ALL
from nwor_bench.report.text import NOT_MEASURED
from nwor_bench.stats.robust import MIN_GROUPS

pytestmark = pytest.mark.usefixtures("own_surroundings")


@dataclass(frozen=True)
class Said:
    """What the command said, its lines joined, and what it asked the server."""

    code: int
    out: str
    err: str
    asked: list[str]

    @property
    def words(self) -> str:
        return " ".join(self.out.split())


Live = Callable[..., Said]


@pytest.fixture
def live(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> Live:
    """Run the command against a server with these pages, given as one or as a list."""
    monkeypatch.setattr(watching, "EVERY_S", 0.01)

    def run(pages: str | list[str], *flags: str, status: int = 200) -> Said:
        with serving(*([pages] if isinstance(pages, str) else pages), status=status) as server:
            return Said(*command_line("live", server.url, *flags), server.asked)

    return run


SOON = ("--time-budget", "0.05s")
NARROW = {"1": PAYS, ALL: PAYS}
FEW, PAYING, WIDE = drafts_page({ALL: {}}), drafts_page(NARROW), drafts_page(NARROW, half=0.6)
COSTING = drafts_page({"1": COSTS, ALL: COSTS})


@pytest.mark.parametrize(
    ("page", "plain", "strict", "start", "words"),
    [
        (known(FASTER), 0, 0, "FASTER: ", "time of a window -3.0 %"),
        (known(SLOWER), 0, 0, "SLOWER: ", "time of a window +4.0"),
        (known(SAME), 0, 0, "SAME: ", " in stage x graph."),
        (known(UNSURE), 0, 5, "AMBIGUOUS: ", "(95 %: "),
        (modes_page(), 0, 5, "NOTHING COMPARED: ", "Send it requests."),
        (known(SLOWER, clock="host"), 0, 0, "CPU RUN: time of a window", "a CPU times the h"),
        (known(FASTER, stopped="commit_refused"), 3, 3, "STAGING STOPPED: ", "commit was refused"),
        (DRAFTS, 0, 0, "FASTER: ", "1.50 times the tokens/s (95 %: 1.48"),
        (PAYING, 0, 0, "FASTER: ", "1.50 times the tokens/s (95 %: "),
        (COSTING, 0, 0, "SLOWER: ", "Do not speculate"),
        (FEW, 0, 5, "NOT MEASURED: ", "Whether speculation pays is not known"),
        (WIDE, 0, 5, "AMBIGUOUS: ", "No draft count is shown to pay"),
        (drafts_page(NARROW, clock="host"), 0, 0, "FASTER: ", "1.50 times"),
    ],
)  # fmt: skip
def test_the_answer_comes_first_and_strict_ends_with_5_if_it_is_inconclusive(
    live: Live, page: str, plain: int, strict: int, start: str, words: str
) -> None:
    said = live(page, *SOON)
    assert (said.code, said.err) == (plain, "")
    assert said.words.startswith(start)
    assert words in said.words
    assert max(map(len, said.out.splitlines())) <= 80
    assert set(said.asked) == {"/metrics"}
    assert ("On a CPU the times judge" in said.out) is ("nwor_drafts" in page and "host" in page)
    assert live(page, *SOON, "--strict", "-q").code == strict


@pytest.mark.parametrize("page", [known(FASTER, left_out={"untimed": 3}), DRAFTS])
def test_quiet_leaves_the_answer_alone(live: Live, page: str) -> None:
    whole, quiet = live(page, *SOON).words, live(page, *SOON, "-q").words
    assert whole.startswith(quiet)
    assert quiet.endswith(("x graph.", "k = 2."))


@pytest.mark.parametrize(
    ("page", "flags", "name", "values"),
    [
        (
            known(FASTER, left_out={"untimed": 3}, aa=(1.0001, 0.9985, 1.0017)),
            ("--num-reqs", "7"), "live",
            {"left_out": {"untimed": 3}, "staging_stopped": None, "ended": "ci_width",
             "aa": {"ratio": 1.0001, "ratio_ci_low": 0.9985, "ratio_ci_high": 1.0017,
                    "groups": 100}, "exit_code": 0},
        ),
        (
            DRAFTS, SOON, "live, of draft counts",
            {"best": {"1": 2, "9-16": 0}, "windows": {"0": 1000, "1": 3000, "2": 3100},
             "left_out": {"interrupted": 40, "drafts": 2}, "ended": "time_budget", "exit_code": 0},
        ),
    ],
    ids=["modes", "drafts"],
)  # fmt: skip
def test_the_document_has_every_documented_key(
    live: Live, page: str, flags: tuple[str, ...], name: str, values: dict[str, Any]
) -> None:
    said = live(page, "--json", *flags)
    assert (said.code, said.err) == (0, "")
    told = json.loads(said.out)
    assert lacking(told, name) == []
    assert set(told) == top_level(name)
    assert {key: told[key] for key in values} == values


@pytest.mark.parametrize(
    ("page", "num_reqs", "words"),
    [
        (known(FASTER), "5-8", "0:01:01  5-8: 0.9700 [0.9680, 0.9720] in 400 groups"),
        (DRAFTS, ALL, "0:01:01  all: 1.50 [1.48, 1.52] times the tokens/s of k = 0 with k = 2, 400 "
         "groups a draft count"),
        (FEW, ALL, f"0:01:01  all: {NOT_MEASURED}, 0 groups a draft count"),
    ],
)  # fmt: skip
def test_the_progress_line(page: str, num_reqs: str, words: str) -> None:
    reading = reading_of(page, "http://h/metrics")
    assert progress_line(reading, Wanted(num_reqs, 0.005, 60.0), 61.4) == words


def test_estimates_rest_on_no_more_groups_than_a_server_keeps() -> None:
    reading = reading_of(drafts_page(NARROW, groups=9 * MAX_KEPT), "http://h/metrics")
    assert {rate.groups for rate in reading.worth().rates} == {MAX_KEPT}
    assert reading.groups("1") == 9 * MAX_KEPT


@pytest.mark.parametrize(
    ("aa", "warns"), [((1.0, 0.999, 1.001), False), ((1.003, 1.001, 1.005), True), (None, False)]
)
def test_the_answer_says_if_off_differs_from_itself(
    live: Live, aa: Ratio | None, warns: bool
) -> None:
    said = live(known(FASTER, aa=aa))
    warning = "off over itself 1.0030 [1.0010, 1.0050] in 100 groups"
    assert (said.code, warning in said.words) == (0, warns)
    shown = f"{NOT_MEASURED}, 0" if aa is None else f"{aa[0]:.4f} [{aa[1]:.4f}, {aa[2]:.4f}], 100"
    assert f"Off against itself (A/A): {shown} groups." in said.words


N = FIRST_LOOK


@pytest.mark.parametrize(
    ("pages", "flags", "ended_at", "readings"),
    [
        (
            [
                modes_page(),
                modes_page({ALL: FASTER}, {ALL: N - 1}),  # narrow by luck: too few to look
                modes_page({ALL: (0.97, 0.95, 0.99)}, {ALL: N}),
                modes_page({ALL: FASTER}, {ALL: N + 1}),  # too soon to look again
                modes_page({ALL: FASTER}, {ALL: N * 2}),  # narrow: as many groups again
                *(modes_page({ALL: FASTER}, {ALL: n}) for n in (N * 4 - 1, N * 4, N * 9)),
            ],
            (), f"{N * 4} groups", 7,
        ),
        (
            [
                drafts_page(NARROW, groups=N - 1, half=0.001),
                drafts_page(NARROW, groups=N, half=0.001, half_of_2=0.02),
                *(drafts_page(NARROW, groups=N * n, half=0.001) for n in (2, 4, 9)),
            ],
            ("--ci-width", "1%"), f" {N * 4} ", 4,
        ),
    ],
    ids=["modes", "drafts"],
)  # fmt: skip
def test_it_reads_until_the_intervals_of_all_cells_are_narrow(
    live: Live, pages: list[str], flags: tuple[str, ...], ended_at: str, readings: int
) -> None:
    said = live(pages, *flags)
    assert (said.code, len(said.asked)) == (0, readings)
    assert ended_at in said.words


@pytest.mark.parametrize(
    ("page", "num_reqs", "words"),
    [
        (
            modes_page({"1": UNSURE, "5-8": FASTER, ALL: UNSURE}, {"1": 9, "5-8": 200, ALL: 300}),
            "5-8", "FASTER: time of a window of 5-8 requests -3.",
        ),
        (DRAFTS, "12", "SLOWER: Do not speculate: at best 0.80 times the tokens/s (95 %: 0.79"),
        (known(FASTER), "200", "NOTHING COMPARED: Too few groups of windows were compared (0): 400 "
         "others have windows of another size than 129-256 requests."),
        (modes_page(groups={"1": 9, ALL: 9}), ALL, "NOTHING COMPARED: Too few groups of windows "
         f"were compared (9), and a ratio needs {MIN_GROUPS}"),
        (modes_page(left_out={"fallback": 50}, fallbacks={"kv_transfer": 200}), ALL,
         "NOTHING COMPARED: Too few groups of windows were compared (0): no window is staged, "
         "because of kv_transfer."),
    ],
)  # fmt: skip
def test_the_class_that_is_asked_for_decides(
    live: Live, page: str, num_reqs: str, words: str
) -> None:
    said = live(page, "-q", *SOON, "--num-reqs", num_reqs)
    assert said.code == 0
    assert said.words.startswith(words)


def with_update(text: str, ago_s: float) -> str:
    """The page of a server that updated its metrics that long ago."""
    return f'{text.rstrip()}\nnwor_live_updated_seconds{{rank="0"}} {time.time() - ago_s}\n'


@pytest.mark.parametrize("page", [known(FASTER), DRAFTS])
@pytest.mark.parametrize(("ago_s", "stale"), [(1, False), (STALE_AFTER_S + 60, True)])
def test_metrics_that_are_no_longer_updated_are_no_answer(
    live: Live, page: str, ago_s: float, stale: bool
) -> None:
    said = live(with_update(page, ago_s), *SOON)
    assert said.code == (ExitCode.FAILED if stale else 0)
    assert said.out.startswith("" if stale else "FASTER: ")
    assert ("/metrics has not updated its metrics for " in " ".join(said.err.split())) is stale


def test_a_server_that_stops_updating_is_gone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "GONE_AFTER_S", 0.05)
    pages = [with_update(modes_page(), 1), with_update(known(FASTER), STALE_AFTER_S + 60)]
    said = live(pages)
    assert said.code == ExitCode.FAILED
    assert "FASTER" not in said.out
    assert "or no longer updates them; this is what it said last." in said.words


def test_a_guard_that_another_rank_shows_ends_with_3(live: Live) -> None:
    stopped = modes_page(stopped="commit_refused", rank=1).replace(OTHERS, "")
    said = live(known(FASTER) + stopped)
    assert (said.code, said.err) == (ExitCode.CORRECTNESS_BROKEN, "")
    assert "Staging: stopped for good (commit_refused)." in said.words


@pytest.mark.parametrize(
    ("text", "status", "code", "words"),
    [
        (OTHERS, 200, 2, "no metrics of nwor-bench are there; start the server with VLLM_NWOR"),
        ("<html>hello</html>", 200, 2, "VLLM_NWOR_MODE=interleave"),
        (OTHERS, 200, 2, "with speculation"),
        ('nwor_windows_total{nwor_mode="stage"} 3.0\n', 200, 2, "runs only in mode stage"),
        ('nwor_fallback_count_total{nwor_mode="interleave",reason="attach:PatchError"} 1.0\n', 200,
         2, "not attached there (attach:PatchError)"),
        ("", 404, 2, "VLLM_NWOR_MODE=interleave"), ("", 500, 1, "500"), ("", 401, 1, "401"),
    ],
)  # fmt: skip
def test_without_these_metrics_it_says_what_to_set(
    live: Live, text: str, status: int, code: int, words: str
) -> None:
    said = live(text, "--json", status=status)
    assert (said.code, said.out) == (code, "")
    assert words in " ".join(said.err.split())


def test_nobody_there(command_line: Any) -> None:
    with serving() as unused:
        pass
    code, out, err = command_line("live", unused.url)
    assert (code, out) == (ExitCode.FAILED, "")
    assert "is the server up?" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("localhost:x",), ("ftp://a",), ("http://",), ("http://a:x",), ("http://a b",),
        ("http://a/\u00fc",), ("http://b:c@a",), (f"http://{'a' * 64}.b",),
        ("http://a", "--num-reqs", "3-5"), ("http://a", "--num-reqs", "0"),
        ("http://a", "--ci-width", "2"), ("http://a", "--time-budget", "soon"),
    ],
)  # fmt: skip
def test_slips_are_refused_before_anything_is_asked(
    command_line: Any, arguments: tuple[str, ...]
) -> None:
    code, out, err = command_line("live", *arguments)
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert "is invalid" in err


def test_metrics_stand_below_the_address() -> None:
    for given in ("http://h:8000", "h:8000", "http://h:8000/", "http://h:8000/metrics"):
        assert metrics_address(given) == "http://h:8000/metrics"
    assert metrics_address("https://h/base/") == "https://h/base/metrics"


def watched(*steps: str | BaseException) -> watching.Seen:
    """Watch a server's readings on a clock, both made of what a test says; the last one stays."""
    left, now = list(steps), [0.0]

    def read() -> Reading:
        step = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(step, BaseException):
            raise step
        return reading_of(step, "http://h/metrics")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    wanted = Wanted(ALL, 0.005, 600.0)
    return watch(read, wanted, lambda *_: None, sleep=sleep, clock=lambda: now[0])


UNDONE, LAST = modes_page({ALL: UNSURE}, {ALL: 60}), modes_page({ALL: FASTER}, {ALL: 800})


@pytest.mark.parametrize(
    ("steps", "ended", "waited_s", "groups"),
    [
        ((UNDONE,), Ended.TIME, 600.0, 60),
        ((UNDONE, KeyboardInterrupt()), Ended.INTERRUPTED, 1.0, 60),
        ((modes_page(), Unreachable("gone"), known(FASTER), LAST), Ended.WIDTH, 3.0, 800),
        ((UNDONE, Unreachable("gone")), Ended.GONE, GONE_AFTER_S + 1, 60),
        # A proxy may answer while its server restarts.
        ((UNDONE, "<html>404", known(FASTER), LAST), Ended.WIDTH, 3.0, 800),
        ((UNDONE, "<html>404"), Ended.GONE, GONE_AFTER_S + 1, 60),
        # A restarted server counts from 0, and so do the looks.
        (
            (modes_page({ALL: UNSURE}, {ALL: 4000}), *(modes_page({ALL: FASTER}, {ALL: n})
             for n in (10, N, 2 * N))), Ended.WIDTH, 3.0, 2 * N,
        ),
    ],
)  # fmt: skip
def test_what_ends_it(
    steps: tuple[str | BaseException, ...], ended: Ended, waited_s: float, groups: int
) -> None:
    found = watched(*steps)
    assert (found.ended, found.waited_s) == (ended, waited_s)
    assert found.reading.groups(ALL) == groups


def test_every_reason_has_words_and_the_page_tells_all_of_it() -> None:
    assert {*LeftOut, *Guard} <= set(IN_WORDS)
    assert in_words("own") == "own"
    assert in_words("batch_size") == "with a batch size that changed its class"
    text = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")
    for word in (*LeftOut, *Guard, "VLLM_NWOR_MODE=interleave", "nwor-bench live http"):
        assert word in text
