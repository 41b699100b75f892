"""`nwor-bench live` against a server whose draft counts alternate: what it says of its metrics."""

import json
from collections.abc import Callable, Iterator, Mapping

import pytest
from documented_keys import lacking, top_level
from test_live_command import OTHERS, Server, serving, with_update

from nwor_bench.errors import ExitCode
from nwor_bench.live.reading import STALE_AFTER_S, reading_of
from nwor_bench.live.text import progress_line
from nwor_bench.live.watch import FIRST_LOOK, Wanted
from nwor_bench.records.window_order import ALL

Run = Callable[..., tuple[int, str, str]]
Counts = Mapping[int, tuple[float, float]]
"""By draft count: time of a window over k = 0, and tokens."""

pytestmark = [
    pytest.mark.usefixtures("own_surroundings"),
    pytest.mark.slow,  # pandas is imported
]

PAYS: Counts = {1: (1.2, 1.6), 2: (1.4, 2.1)}
"""1.33 and 1.5 times the tokens/s."""
COSTS: Counts = {1: (2.0, 1.6), 2: (3.0, 2.1)}
BASE = 'nwor_mode="off",pair="a + b",rank="0",scv_mode="off"'


def page(
    classes: Mapping[str, Counts],
    *,
    groups: int = 400,
    half: float = 0.01,
    half_of_2: float | None = None,
    clock: str = "device",
    left_out: Mapping[str, int] | None = None,
) -> str:
    """Samples as vLLM's /metrics shows them; `half` of each interval, as a fraction, and of those
    of k = 2 if they differ."""
    lines = [f'nwor_drafts_info{{{BASE},method="eagle3",model="some/head"}} 1.0']
    lines += [f'nwor_drafts_windows_total{{{BASE},drafts="{k}"}} {n}.0' for k, n in WINDOWS.items()]
    for why, number in (left_out or {"interrupted": 0}).items():
        lines.append(f'nwor_drafts_groups_left_out_total{{{BASE},reason="{why}"}} {number}.0')
    for name, counts in classes.items():
        for k, (time, tokens) in {0: (1.001, 0.0), **counts}.items():
            at = f'{BASE},num_reqs="{name}",drafts="{k}"'
            lines.append(f"nwor_drafts_groups_total{{{at}}} {groups}.0")
            shown = {"time_ratio": (time, f'{at},clock="{clock}"')}
            if k:
                lines.append(f"nwor_drafts_spans_total{{{at}}} {groups}.0")
                shown["tokens"] = (tokens, at)
            most = 1 + (half if half_of_2 is None or k != 2 else half_of_2)
            for metric, (value, labels) in shown.items():
                for ending, factor in (("", 1.0), ("_low", 1 / most), ("_high", most)):
                    lines.append(f"nwor_drafts_{metric}{ending}{{{labels}}} {value * factor}")
    return OTHERS + "\n".join([*lines, ""])


WINDOWS = {0: 1000, 1: 3000, 2: 3100}
KNOWN = page({"1": PAYS, "9-16": COSTS, ALL: PAYS}, left_out={"interrupted": 40, "drafts": 2})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from serving(monkeypatch)


def test_the_sentence_the_table_and_the_line(command_line: Run, server: Server) -> None:
    server.pages = [KNOWN]
    code, out, err = command_line("live", server.url, "--time-budget", "0.05s")
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert said.startswith(
        "FASTER: Speculate up to 1 request: 1.50 times the tokens/s of k = 0 at 1 request with "
        "k = 2; at 9-16 requests no draft count is shown to pay."
    )
    rows = [line.split() for line in out.splitlines() if line.startswith(("1 ", "9-16 "))]
    assert [row[:4] for row in rows] == [
        ["1", "1", "FASTER", "1.33"], ["1", "2", "FASTER", "1.50"],
        ["9-16", "1", "SLOWER", "0.80"], ["9-16", "2", "SLOWER", "0.70"],
    ]  # fmt: skip
    assert rows[0][-3:] == ["1.60", "1.20", "400"]
    # Between the classes nothing was measured: the smaller count.
    assert (
        """--speculative-config '{"method": "eagle3", "model": "some/head", """
        """"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": """
        """[[1, 1, 2], [2, 16, 0]]}'"""
    ) in said
    assert "Above 16 requests nothing was measured" in said
    assert "Windows: 1,000 at k = 0, 3,000 at k = 1, 3,100 at k = 2." in said
    assert "40 interrupted by a step that is more than windows; 2 with a window that verif" in said
    assert "Noise, the time of k = 0 over itself: 1.00 [0.99, 1.01] at 1 request" in said
    assert "Timed on the device's clock." in said
    assert "Measured on a CPU" not in said
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = command_line("live", server.url, "-q", "--time-budget", "0.05s")
    assert " ".join(out.split()).endswith("no draft count is shown to pay.")


def test_draft_counts_that_are_no_longer_updated_are_no_answer(
    command_line: Run, server: Server
) -> None:
    server.pages = [with_update(KNOWN, STALE_AFTER_S + 60)]
    code, out, err = command_line("live", server.url)
    assert (code, out) == (ExitCode.FAILED, "")
    assert "/metrics has not updated its metrics for " in " ".join(err.split())


def test_a_class_that_is_asked_for_is_the_answer(command_line: Run, server: Server) -> None:
    server.pages = [KNOWN]
    flags = ("--time-budget", "0.05s", "--num-reqs", "12", "-q")
    code, out, _ = command_line("live", server.url, *flags)
    assert code == 0
    said = " ".join(out.split())
    assert said.startswith("SLOWER: Do not speculate here: at best it gives 0.80 [0.79, 0.81]")
    assert said.endswith("at 9-16 requests with k = 1.")


def test_the_document_has_every_documented_key(command_line: Run, server: Server) -> None:
    server.pages = [KNOWN]
    code, out, err = command_line("live", server.url, "--json", "--time-budget", "0.05s")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert lacking(told, "live, of draft counts") == []
    assert set(told) == top_level("live, of draft counts")
    assert told["best"] == {"1": 2, "9-16": 0}
    assert told["windows"] == {"0": 1000, "1": 3000, "2": 3100}
    assert told["left_out"] == {"interrupted": 40, "drafts": 2}
    assert [(rate["num_reqs"], rate["drafts"]) for rate in told["rates"]] == [
        ("1", 1), ("1", 2), ("9-16", 1), ("9-16", 2),
    ]  # fmt: skip
    assert (told["ended"], told["exit_code"]) == ("time_budget", 0)


def test_it_reads_until_the_intervals_of_all_counts_are_narrow(
    command_line: Run, server: Server
) -> None:
    narrow = {"1": PAYS, ALL: PAYS}
    server.pages = [
        page(narrow, groups=FIRST_LOOK - 1, half=0.001),
        page(narrow, groups=FIRST_LOOK, half=0.001, half_of_2=0.02),
        page(narrow, groups=2 * FIRST_LOOK, half=0.001),
        page(narrow, groups=4 * FIRST_LOOK, half=0.001),
        page(narrow, groups=9 * FIRST_LOOK, half=0.001),
    ]
    code, out, _ = command_line("live", server.url, "--json", "--ci-width", "1%")
    told = json.loads(out)
    assert (code, told["ended"]) == (0, "ci_width")
    assert {rate["groups"] for rate in told["rates"]} == {4 * FIRST_LOOK}
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("text", "plain", "strict", "words"),
    [
        (page({ALL: {}}), 0, 5, "AMBIGUOUS: This does not show whether speculation pays"),
        (page({"1": PAYS, ALL: PAYS}, half=0.6), 0, 5, "AMBIGUOUS: No draft count is shown to pay"),
        (page({"1": PAYS, ALL: PAYS}), 0, 0, "FASTER: "),
        (page({"1": COSTS, ALL: COSTS}), 0, 0, "SLOWER: "),
    ],
    ids=["no groups", "unsure", "faster", "slower"],
)
def test_strict_ends_with_5_if_it_is_inconclusive(
    command_line: Run, server: Server, text: str, plain: int, strict: int, words: str
) -> None:
    server.pages = [text]
    flags = ("live", server.url, "--time-budget", "0.05s")
    code, out, _ = command_line(*flags)
    assert (code, words in " ".join(out.split())) == (plain, True)
    assert command_line(*flags, "--strict", "-q")[0] == strict


def test_a_cpu_server_is_reported_as_one(command_line: Run, server: Server) -> None:
    server.pages = [page({"1": PAYS, ALL: PAYS}, clock="host")]
    _, out, _ = command_line("live", server.url, "--time-budget", "0.05s")
    assert "Measured on a CPU" in out
    assert "They do not carry over to a GPU" in " ".join(out.split())


def test_the_progress_line() -> None:
    reading = reading_of(KNOWN, "http://h/metrics")
    line = progress_line(reading, Wanted(ALL, 0.005, 60.0), 61.4)
    start = "0:01:01  all: 1.50 ["
    end = "] times the tokens/s of k = 0 with k = 2, 400 groups a draft count"
    assert line.startswith(start)
    assert line.endswith(end)
    empty = reading_of(page({ALL: {}}), "http://h/metrics")
    assert "0 groups a draft count" in progress_line(empty, Wanted(ALL, 0.005, 60.0), 1.0)
