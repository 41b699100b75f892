"""`nwor-bench live` against a small server: what it says, when it ends, with which exit code."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from documented_keys import lacking, top_level

from nwor_bench.errors import ExitCode
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
from nwor_bench.report.answer import CPU_SENTENCE
from nwor_bench.report.text import NOT_MEASURED
from nwor_bench.stats.robust import MIN_GROUPS

Run = Callable[..., tuple[int, str, str]]
Ratio = tuple[float, float, float]

pytestmark = pytest.mark.usefixtures("own_surroundings")

OTHERS = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
some_odd_line{without="a value"}
"""
FASTER, SAME, SLOWER, UNSURE = (
    (0.97, 0.968, 0.972), (1.001, 0.997, 1.005), (1.04, 1.036, 1.044), (0.999, 0.96, 1.04),
)  # fmt: skip


def page(
    ratios: dict[str, Ratio] | None = None,
    groups: dict[str, int] | None = None,
    *,
    left_out: dict[str, int] | None = None,
    stopped: str | None = None,
    fallbacks: dict[str, int] | None = None,
    clock: str = "device",
    rank: int = 0,
    aa: Ratio | None = None,
) -> str:
    """Samples as vLLM's /metrics shows them."""
    base = f'nwor_mode="interleave",pair="a + b",rank="{rank}",scv_mode="graph"'
    lines = ["# TYPE nwor_live_groups_total counter"]
    for name, number in {ALL: 0, **(groups or {})}.items():
        lines.append(f'nwor_live_groups_total{{{base},num_reqs="{name}"}} {number}.0')
    for name, values in (ratios or {}).items():
        for ending, value in zip(("", "_low", "_high"), values, strict=True):
            at = f'{base},num_reqs="{name}",clock="{clock}"'
            lines.append(f"nwor_live_ratio{ending}{{{at}}} {value}")
    if aa is not None:
        lines.append(f'nwor_live_aa_groups_total{{{base},num_reqs="all"}} 100.0')
        for ending, value in zip(("", "_low", "_high"), aa, strict=True):
            at = f'{base},num_reqs="all",clock="{clock}"'
            lines.append(f"nwor_live_aa_ratio{ending}{{{at}}} {value}")
    by_reason = {
        "nwor_live_groups_left_out_total": {"interrupted": 0, **(left_out or {})},
        "nwor_live_staging_stopped_total": {"ranks_differ": 0, **({stopped: 1} if stopped else {})},
        "nwor_fallback_count_total": {"kv_transfer": 0, **(fallbacks or {})},
    }
    for name, values in by_reason.items():
        lines += [f'{name}{{{base},reason="{why}"}} {n}.0' for why, n in values.items()]
    return OTHERS + "\n".join([*lines, ""])


def known(ratio: Ratio, **more: object) -> str:
    return page({ALL: ratio, "5-8": ratio}, {ALL: 400, "5-8": 400}, **more)  # type: ignore[arg-type]


class Server:
    """Answers each request with the next of its pages, the last one again and again."""

    def __init__(self) -> None:
        self.pages: list[str] = []
        self.status = 200
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                body = outer.pages[min(len(outer.asked), len(outer.pages)) - 1].encode()
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from serving(monkeypatch)


def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(watching, "EVERY_S", 0.01)
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.http.shutdown()
    thread.join()
    found.http.server_close()


@pytest.mark.parametrize(
    ("ratio", "badge", "words"),
    [
        (FASTER, "FASTER", "Yes, NWOR pays here: in stage x graph a window takes 3.0 % less time"),
        (SLOWER, "SLOWER", "it costs time: in stage x graph a window takes 4.0 % more time"),
        (SAME, "SAME", "it makes no difference of more than 1 %"),
    ],
)
def test_the_answer_comes_first(
    command_line: Run, server: Server, ratio: Ratio, badge: str, words: str
) -> None:
    server.pages = [known(ratio, left_out={"interrupted": 40, "batch_size": 2})]
    code, out, err = command_line("live", server.url)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert said.startswith(f"{badge}: ")
    assert words in said
    assert "40 interrupted by a step that is more than windows; 2 with a batch size" in said
    assert "Staging: on, stage x graph and off x off interleaved." in said
    assert "Timed on the device's clock." in said
    assert max(map(len, out.splitlines())) <= 80
    assert server.asked == ["/metrics"]


def test_the_progress_line() -> None:
    reading = reading_of(known(FASTER), "http://h/metrics")
    line = progress_line(reading, Wanted("5-8", 0.005, 60.0), 61.4)
    assert line == "0:01:01  5-8: 0.9700 [0.9680, 0.9720] in 400 groups"


def test_the_document_has_every_documented_key(command_line: Run, server: Server) -> None:
    server.pages = [known(FASTER, left_out={"untimed": 3}, aa=(1.0001, 0.9985, 1.0017))]
    code, out, err = command_line("live", server.url, "--json", "--num-reqs", "7")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert lacking(told, "live") == []
    assert set(told) == top_level("live")
    assert told["answer"]["badge"] == "FASTER"
    assert told["answer"]["num_reqs"] == "5-8"
    assert told["classes"][0] == {
        "num_reqs": "5-8", "ratio": 0.97, "ratio_ci_low": 0.968, "ratio_ci_high": 0.972,
        "groups": 400,
    }  # fmt: skip
    assert told["left_out"] == {"untimed": 3}
    assert told["aa"] == {
        "ratio": 1.0001, "ratio_ci_low": 0.9985, "ratio_ci_high": 1.0017, "groups": 100,
    }  # fmt: skip
    assert (told["staging_stopped"], told["ended"], told["exit_code"]) == (None, "ci_width", 0)


@pytest.mark.parametrize(
    ("aa", "warns"), [((1.0, 0.999, 1.001), False), ((1.003, 1.001, 1.005), True), (None, False)]
)
def test_the_answer_says_if_off_differs_from_itself(
    command_line: Run, server: Server, aa: Ratio | None, warns: bool
) -> None:
    server.pages = [known(FASTER, aa=aa)]
    code, out, _ = command_line("live", server.url)
    said = " ".join(out.split())
    assert code == 0
    assert ("off differs from itself (A/A): 1.0030 [1.0010, 1.0050] in 100 groups" in said) is warns
    shown = f"{NOT_MEASURED}, 0" if aa is None else f"{aa[0]:.4f} [{aa[1]:.4f}, {aa[2]:.4f}], 100"
    assert f"Off against itself (A/A): {shown} groups." in said


def test_it_reads_until_the_interval_is_narrow(command_line: Run, server: Server) -> None:
    wide, groups = (0.97, 0.95, 0.99), FIRST_LOOK
    server.pages = [
        page(),
        page({ALL: FASTER}, {ALL: FIRST_LOOK - 1}),  # narrow by luck: too few to look
        page({ALL: wide}, {ALL: groups}),
        page({ALL: FASTER}, {ALL: groups + 1}),  # too soon to look again
        page({ALL: FASTER}, {ALL: groups * 2}),  # narrow: as many groups again
        page({ALL: FASTER}, {ALL: groups * 4 - 1}),
        page({ALL: FASTER}, {ALL: groups * 4}),
        page({ALL: FASTER}, {ALL: groups * 9}),
    ]
    code, out, _ = command_line("live", server.url, "-q")
    assert code == 0
    assert f"{groups * 4} groups" in out
    assert len(server.asked) == 7


def test_the_class_that_is_asked_for_decides(command_line: Run, server: Server) -> None:
    ratios = {"1": UNSURE, "5-8": FASTER, ALL: UNSURE}
    server.pages = [page(ratios, {"1": 100, "5-8": 200, ALL: 300})]
    code, out, _ = command_line("live", server.url, "-q", "--num-reqs", "5-8")
    assert code == 0
    assert "a window of 5-8 requests takes 3.0 % less" in " ".join(out.split())
    code, out, _ = command_line("live", server.url, "-q", "--time-budget", "0.05s")
    assert "AMBIGUOUS: This traffic cannot yet say" in out


@pytest.mark.parametrize(
    ("ratio", "plain", "strict"), [(UNSURE, 0, 5), (FASTER, 0, 0), (SAME, 0, 0), (None, 0, 5)]
)
def test_strict_ends_with_5_if_it_is_inconclusive(
    command_line: Run, server: Server, ratio: Ratio | None, plain: int, strict: int
) -> None:
    server.pages = [page() if ratio is None else known(ratio)]
    flags = ("live", server.url, "-q", "--time-budget", "0.05s")
    assert command_line(*flags)[0] == plain
    assert command_line(*flags, "--strict")[0] == strict


def test_a_cpu_server_is_reported_as_one(command_line: Run, server: Server) -> None:
    server.pages = [known(SLOWER, clock="host")]
    code, out, _ = command_line("live", server.url)
    assert code == 0
    said = " ".join(out.split())
    assert "CPU RUN: in stage x graph" in said
    assert CPU_SENTENCE in said
    assert "pays" not in said


def with_update(text: str, ago_s: float) -> str:
    """The page of a server that updated its metrics that long ago."""
    base = 'nwor_mode="interleave",pair="a + b",rank="0",scv_mode="graph"'
    return f"{text.rstrip()}\nnwor_live_updated_seconds{{{base}}} {time.time() - ago_s}\n"


@pytest.mark.parametrize(("ago_s", "stale"), [(1, False), (STALE_AFTER_S + 60, True)])
def test_metrics_that_are_no_longer_updated_are_no_answer(
    command_line: Run, server: Server, ago_s: float, stale: bool
) -> None:
    server.pages = [with_update(known(FASTER), ago_s)]
    code, out, err = command_line("live", server.url)
    assert code == (ExitCode.FAILED if stale else 0)
    assert out.startswith("" if stale else "FASTER: ")
    assert ("/metrics has not updated its metrics for " in " ".join(err.split())) is stale


def test_a_server_that_stops_updating_is_gone(
    command_line: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "GONE_AFTER_S", 0.05)
    server.pages = [with_update(page(), 1), with_update(known(FASTER), STALE_AFTER_S + 60)]
    code, out, _ = command_line("live", server.url)
    assert code == ExitCode.FAILED
    assert "FASTER" not in out
    assert "or no longer updates them; this is what it said last." in " ".join(out.split())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_guard_that_stopped_staging_ends_with_3(
    command_line: Run, server: Server, rank: int
) -> None:
    """Also if only another rank than the one whose ratio is shown says so."""
    stopped = page(stopped="commit_refused", rank=rank).replace(OTHERS, "")
    server.pages = [known(FASTER) if rank == 0 else known(FASTER).rstrip() + "\n" + stopped]
    if rank == 0:
        server.pages = [known(FASTER, stopped="commit_refused")]
    code, out, err = command_line("live", server.url)
    assert (code, err) == (ExitCode.CORRECTNESS_BROKEN, "")
    said = " ".join(out.split())
    assert "STAGING STOPPED: Staging has stopped for good because a commit was refused" in said
    assert "Staging: stopped for good (commit_refused)." in said
    code, out, _ = command_line("live", server.url, "--json")
    assert (code, json.loads(out)["staging_stopped"]) == (3, "commit_refused")


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (page(left_out={"fallback": 50}, fallbacks={"kv_transfer": 200}), (),
         "no window is staged, because of kv_transfer."),
        (page(), (), "Send it requests."),
        (page(groups={"1": 9, ALL: 9}), (), f"(9), and a ratio needs {MIN_GROUPS}"),
        (known(FASTER), ("--num-reqs", "200"), "400 others have windows of another size than 129-"),
    ],
    ids=["never staged", "no traffic", "too few groups", "another class"],
)  # fmt: skip
def test_without_a_ratio_it_says_why(
    command_line: Run, server: Server, text: str, flags: tuple[str, ...], words: str
) -> None:
    server.pages = [text]
    _, out, _ = command_line("live", server.url, "-q", "--time-budget", "0.05s", *flags)
    assert words in " ".join(out.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OTHERS, "no metrics of nwor-bench are there; start the server with VLLM_NWOR_MODE="),
        ("<html>hello</html>", "VLLM_NWOR_MODE=interleave"),
        (OTHERS, "with speculation"),
        ('nwor_windows_total{nwor_mode="stage"} 3.0\n', "runs only in mode stage"),
        (
            'nwor_fallback_count_total{nwor_mode="interleave",reason="attach:PatchError"} 1.0\n',
            "not attached there (attach:PatchError)",
        ),
    ],
    ids=["another server", "no metrics", "no speculation", "another mode", "not attached"],
)
def test_without_these_metrics_it_says_what_to_set(
    command_line: Run, server: Server, text: str, words: str
) -> None:
    server.pages = [text]
    code, out, err = command_line("live", server.url, "--json")
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize(("status", "code"), [(404, 2), (500, 1), (401, 1)])
def test_an_error_instead_of_metrics(
    command_line: Run, server: Server, status: int, code: int
) -> None:
    server.pages, server.status = [""], status
    found, out, err = command_line("live", server.url)
    assert (found, out) == (code, "")
    assert "VLLM_NWOR_MODE=interleave" in err or str(status) in err


def test_nobody_there(command_line: Run) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as unused:
        port = unused.server_port
    code, out, err = command_line("live", f"http://127.0.0.1:{port}")
    assert (code, out) == (ExitCode.FAILED, "")
    assert "is the server up?" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("localhost:8000",), ("ftp://a",), ("http://",), ("http://a:x",), ("http://a b",),
        ("http://a/\u00fc",), ("http://b:c@a",), (f"http://{'a' * 64}.b",),
        ("http://a", "--num-reqs", "3-5"), ("http://a", "--num-reqs", "0"),
        ("http://a", "--ci-width", "2"), ("http://a", "--time-budget", "soon"),
    ],
)  # fmt: skip
def test_slips_are_refused_before_anything_is_asked(
    command_line: Run, arguments: tuple[str, ...]
) -> None:
    code, out, err = command_line("live", *arguments)
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert "is invalid" in err


def test_metrics_stand_below_the_address() -> None:
    for given in ("http://h:8000", "http://h:8000/", "http://h:8000/metrics"):
        assert metrics_address(given) == "http://h:8000/metrics"
    assert metrics_address("https://h/base/") == "https://h/base/metrics"


class Script:
    """A server's readings and a clock, both made of what a test says."""

    def __init__(self, *steps: str | BaseException) -> None:
        self.steps, self.now = list(steps), 0.0

    def read(self) -> Reading:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, BaseException):
            raise step
        return reading_of(step, "http://h/metrics")

    def watch(self) -> watching.Seen:
        def sleep(seconds: float) -> None:
            self.now += seconds

        wanted = Wanted(ALL, 0.005, 600.0)
        show = lambda reading, waited_s: None  # noqa: E731
        return watch(self.read, wanted, show, sleep=sleep, clock=lambda: self.now)


UNDONE, WIDE, ODD = page({ALL: UNSURE}, {ALL: 60}), page({ALL: FASTER}, {ALL: 800}), "<html>404"


@pytest.mark.parametrize(
    ("steps", "ended", "waited_s", "groups"),
    [
        ((UNDONE,), Ended.TIME, 600.0, 60),
        ((UNDONE, KeyboardInterrupt()), Ended.INTERRUPTED, 1.0, 60),
        ((page(), Unreachable("gone"), known(FASTER), WIDE), Ended.WIDTH, 3.0, 800),
        ((UNDONE, Unreachable("gone")), Ended.GONE, GONE_AFTER_S + 1, 60),
        # A proxy may answer while its server restarts.
        ((UNDONE, ODD, known(FASTER), WIDE), Ended.WIDTH, 3.0, 800),
        ((UNDONE, ODD), Ended.GONE, GONE_AFTER_S + 1, 60),
        # A restarted server counts from 0, and so do the looks.
        (
            (page({ALL: UNSURE}, {ALL: 4000}), *(page({ALL: FASTER}, {ALL: n})
             for n in (10, FIRST_LOOK, 2 * FIRST_LOOK))), Ended.WIDTH, 3.0, 2 * FIRST_LOOK,
        ),
    ],
)  # fmt: skip
def test_what_ends_it(
    steps: tuple[str | BaseException, ...], ended: Ended, waited_s: float, groups: int
) -> None:
    found = Script(*steps).watch()
    assert (found.ended, found.waited_s) == (ended, waited_s)
    assert found.reading.groups(ALL) == groups


def test_every_reason_has_words() -> None:
    assert set(IN_WORDS) == {*LeftOut, *Guard}
    assert in_words("batch_size") == "with a batch size that changed its class"


def test_the_page_tells_all_of_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")
    for word in (*IN_WORDS, "VLLM_NWOR_MODE=interleave", "nwor-bench live http"):
        assert word in text
