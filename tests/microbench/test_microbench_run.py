"""A run without a GPU: rounds, rows and pages; what is wrong, refused or late is never timed."""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import count
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from fake_bench import BYTES, FACTS, make_bench
from scipy import stats

from nwor_bench.records.facts import Environment
from nwor_bench.records.types import columns
from nwor_bench.report.markdown import render_markdown
from nwor_bench.run.microbench.bench import Bench, graph_timer, run_groups, run_rounds
from nwor_bench.run.microbench.cases import OURS, PEER, Heads, Spec, Window, expand
from nwor_bench.run.microbench.report import (
    KernelRow,
    Result,
    Status,
    document,
    half_widths,
    write_files,
)
from nwor_bench.workload.stopping import FIRST_LOOK, StoppingRule

SPEC = Spec(windows=(Window(8, 4),), acceptances=(0.5,), max_rounds=5)
NAMES = ("nwor", "vllm_cuda", "third")
STOCK = PEER["commit"]


def run(bench: Bench) -> list[KernelRow]:
    return run_groups(bench, expand(bench.spec))


def of(rows: list[KernelRow], name: str, kernel: str = "commit") -> list[KernelRow]:
    return [row for row in rows if (row.implementation, row.kernel) == (name, kernel)]


def drifting(
    rounds: int, ci_width: float, noise: float
) -> tuple[list[str], dict[str, list[float]]]:
    """Contenders of fixed speeds on clocks that drift from round to round: who ran, and times."""
    ran: list[str] = []
    random = Random(3)

    def replay(name: str, us: float) -> float:
        ran.append(name)
        drift = 1 + (len(ran) - 1) // len(NAMES) / 10
        return us * drift * random.uniform(1 - noise, 1 + noise)

    replays = {name: partial(replay, name, us) for us, name in enumerate(NAMES, 1)}
    rule = StoppingRule(min(FIRST_LOOK, rounds), rounds, ci_width)
    return ran, run_rounds(replays, rule, Random(0))


def test_everyone_runs_once_a_round_in_random_order_up_to_the_most_rounds() -> None:
    for rounds in (3, 40):  # 3: fewer than the first look
        ran, measured = drifting(rounds, 0.001, noise=0.5)
        orders = [tuple(ran[i : i + 3]) for i in range(0, len(ran), 3)]
        assert all(sorted(order) == sorted(NAMES) for order in orders)
        assert {len(times) for times in measured.values()} == {rounds}
    assert len(set(orders)) > 5


def test_drift_that_all_share_does_not_widen_the_ratios() -> None:
    _, measured = drifting(100, 0.01, noise=0.0)
    assert {len(times) for times in measured.values()} == {FIRST_LOOK}
    ours, stock = (measured[name] for name in NAMES[:2])
    assert {round(b / a, 9) for a, b in zip(ours, stock, strict=True)} == {2.0}


def test_a_row_holds_what_was_measured() -> None:
    spec = replace(SPEC, kernels=("commit",), cache_dtypes=("bf16",))
    bench = make_bench(spec)
    ours, stock = run(bench)
    said = bench.timer.said
    assert (ours.implementation, stock.implementation) == (OURS, STOCK)
    assert ours.time_us == pytest.approx(median(said[OURS]))
    assert ours.gb_per_s == pytest.approx(BYTES / (median(said[OURS]) * 1e-6) / 1e9)
    assert (ours.ratio, ours.rounds) == (None, 5)
    logs = [log(b / a) for a, b in zip(said[OURS], said[STOCK], strict=True)]
    low, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert stock.ratio.value == pytest.approx(exp(sum(logs) / 5))
    assert stock.ratio.low <= exp(low) * (1 + 1e-9)
    assert stock.ratio.high >= exp(high) * (1 - 1e-9)


def test_every_contender_has_a_row_in_every_case() -> None:
    missing = {STOCK: ModuleNotFoundError("No module named 'vllm'")}
    rows = run(make_bench(replace(SPEC, kernels=tuple(PEER)), missing=missing))
    for kernel, peer in PEER.items():
        heads = 2 if kernel == "verify_attention" else 1
        assert {len(of(rows, name, kernel)) for name in (OURS, peer)} == {2 * heads}  # dtypes
    assert [row.implementation for row in rows[:2]] == [OURS, STOCK]
    (reason,) = {row.reason for row in of(rows, STOCK)}
    assert reason == "ModuleNotFoundError: No module named 'vllm'"


CLIFF = replace(SPEC, kernels=("attention",), cache_dtypes=("bf16",), contexts=(256, 8192),
                heads=(Heads(32, 8),))  # fmt: skip


def test_a_backend_is_compared_with_itself_at_one_row() -> None:
    us = {"triton, 1 row": 10.0, "triton": 30.0, "nwor_staged, 1 row": 8.0, "nwor_staged": 9.0}
    rows = run(make_bench(CLIFF, us))
    assert [(row.implementation, row.context) for row in rows] == [
        ("nwor_staged", 256), ("triton", 256), ("nwor_staged", 8192), ("triton", 8192),
    ]  # fmt: skip
    for row, ratio in zip(rows, (9 / 8, 3, 9 / 8, 3), strict=True):
        assert row.over_one_row.holds(ratio)
        assert row.over_one_row.half_width < 0.01
        assert row.one_row_us == pytest.approx(us[f"{row.implementation}, 1 row"], rel=1e-2)
        assert row.ratio is None
    assert rows[1].time_over_one_row == rows[1].over_one_row.value
    text = render_markdown(document(Result(CLIFF, rows, "", FACTS, Environment(), 1.0)))
    headline = text.splitlines()[2]
    assert "nwor_staged: k + 1 query rows take 1.1" in headline
    assert "triton: k + 1 query rows take 3.00 to 3.00 times one's time." in headline
    table = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| 8x4")]
    assert [(line[0].split(",")[1].strip(), line[1].strip()) for line in table] == [
        ("256", "nwor_staged"), ("8192", "nwor_staged"), ("256", "triton"), ("8192", "triton"),
    ]  # fmt: skip
    numbers = [float(cell.split("[")[0]) for cell in table[-1][2:]]
    assert numbers == pytest.approx([10, 30, 3], rel=1e-2)


@pytest.mark.parametrize("part", ["triton", "triton, 1 row"])
def test_a_backend_that_fails_at_either_number_of_rows_is_named_with_its_reason(part: str) -> None:
    for kind, status in (("missing", Status.REFUSED), ("wrong", Status.INVALID)):
        fault = "7 bytes" if kind == "wrong" else ValueError("no such shape")
        rows = run(make_bench(CLIFF, **{kind: {part: fault}}))
        reason = "7 bytes" if kind == "wrong" else "ValueError: no such shape"
        for row in of(rows, "triton", "attention"):
            assert (row.status, row.reason, row.time_us) == (status, reason, None)
        assert {row.status for row in of(rows, "nwor_staged", "attention")} == {Status.OK}

    def make(group):
        raise torch.OutOfMemoryError

    rows = run(replace(make_bench(CLIFF), contenders=make))
    assert [(row.implementation, row.status) for row in rows] == 2 * [
        ("every backend", Status.REFUSED)
    ]


def test_what_is_wrong_is_not_timed() -> None:
    bench = make_bench(SPEC, wrong={STOCK: "layer 3: 7 bytes"})
    rows = run(bench)
    wrong = of(rows, STOCK)
    assert {(row.status, row.reason, row.time_us) for row in wrong} == {
        (Status.INVALID, "layer 3: 7 bytes", None)
    }
    assert STOCK not in bench.timer.said
    assert {row.status for row in of(rows, OURS)} == {Status.OK}


def test_when_ours_is_wrong_the_peers_are_timed_without_a_ratio() -> None:
    rows = run(make_bench(SPEC, wrong={OURS: "an error flag"}))
    assert {row.status for row in of(rows, OURS)} == {Status.INVALID}
    assert all(row.time_us and row.ratio is None for row in of(rows, STOCK))
    assert half_widths({STOCK: [4.0, 4.4, 3.6]}) == []


def test_what_cannot_be_captured_is_refused_and_ours_may_not() -> None:
    rows = run(make_bench(SPEC, cannot=STOCK))
    assert {(row.status, row.time_us, row.reason) for row in of(rows, STOCK)} == {
        (Status.REFUSED, None, "RuntimeError: cannot be captured")
    }
    with pytest.raises(RuntimeError, match="cannot be captured"):
        run(make_bench(SPEC, cannot=OURS))


def test_inputs_that_do_not_fit_are_a_refusal() -> None:
    bench = make_bench(SPEC)

    def make(group):
        if group.kernel == "commit":
            raise torch.OutOfMemoryError
        return bench.contenders(group)

    rows = run(replace(bench, contenders=make))
    assert {row.status for row in of(rows, OURS)} == {Status.REFUSED}
    assert {row.status for row in of(rows, OURS, "verify_attention")} == {Status.OK}
    full = torch.OutOfMemoryError("CUDA out of memory")
    rows = run(make_bench(SPEC, missing={OURS: full}))
    assert {row.reason for row in of(rows, OURS)} == {"OutOfMemoryError: CUDA out of memory"}


@pytest.mark.parametrize("grows", [True, False])
def test_rounds_under_throttled_clocks_say_so(grows: bool) -> None:
    rows = run(make_bench(SPEC, throttled=count(3, 5 if grows else 0)))
    assert {row.reason for row in rows} == {"the GPU throttled its clocks" if grows else ""}
    assert all(row.time_us for row in rows)


def test_the_timer_captures_every_call_once_and_times_replays_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    testing, said, timed = pytest.importorskip("triton.testing"), [], []
    graph = SimpleNamespace(replay=lambda: said.append("replay"))

    @contextmanager
    def capture(into: object) -> Iterator[None]:
        said.append("capture" if into is graph else "another graph")
        yield
        said.append("end")

    def do_bench(timed_call: Callable[[], None], **_: object) -> float:
        timed.append(timed_call)
        return 1.5  # ms

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(testing, "do_bench", do_bench)
    replay = graph_timer([partial(said.append, name) for name in "abc"])
    assert said == ["a", "b", "c", "wait", "capture", "a", "b", "c", "end"]
    assert replay() == 500  # us a call
    assert set(timed) == {graph.replay}


@pytest.fixture(scope="module")
def result() -> Result:
    spec = replace(SPEC, windows=(Window(8, 4), Window(256, 8)), acceptances=(0.1,))
    bench = make_bench(
        spec,
        {OURS: 1234.5},
        missing={"flash_attention_3": ImportError("it does not import")},
        wrong={STOCK: "layer 0: 9 bytes differ from the reference"},
    )
    environment = Environment(packages={"torch": "2.11.0", "triton": "3.6.0", "vllm": None})
    return Result(spec, run(bench), "nwor-bench kernels --seed 0", FACTS, environment, 12.3)


@pytest.mark.slow
def test_csv_has_fixed_columns_and_leaves_empty_what_was_not_measured(
    result: Result, tmp_path: Path
) -> None:
    write_files(tmp_path, result)
    text = (tmp_path / "kernels.csv").read_text()
    rows = list(csv.DictReader(StringIO(text)))
    assert list(rows[0]) == columns(KernelRow)
    assert len(rows) == len(result.rows)
    untimed = [row for row in rows if row["status"] != "OK"]
    assert {row["implementation"] for row in untimed} == {STOCK, "flash_attention_3"}
    assert {row["time_us"] + row["gb_per_s"] + row["rounds"] for row in untimed} == {""}
    assert "nan" not in text.lower()
    assert float(rows[0]["time_us"]) == pytest.approx(1234.5, rel=1e-2)
    assert rows[0]["context"] == ""


def test_the_page_says_how_it_was_made_and_what_is_wrong(result: Result) -> None:
    text = render_markdown(document(result))
    headline = text.splitlines()[2]
    assert headline.startswith("**INVALID: ")
    assert headline.count("9 bytes differ") == 2 * 2  # windows, cache dtypes
    for words in (
        *("nwor-bench kernels --seed 0", "Fake GPU", "it does not import", "| 8x4, 0.1"),
        *("commit, fp8 cache", "verify_attention, bf16"),
    ):
        assert words in text


def test_the_answer_is_each_kernels_time_against_its_main_peer(result: Result) -> None:
    rows = run(make_bench(SPEC, {OURS: 4.0, STOCK: 80.0}))
    headline = render_markdown(document(replace(result, rows=rows))).splitlines()[2]
    assert "commit: vllm_cuda takes 20.0 to 20.0 times our time." in headline
    assert "verify_attention: flash_attention_3 takes 1.25 to 1.25 times our time." in headline
