"""Drift over a long watch: readings in bounded memory, restarts, planted drift and none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from pages import DRAFTS, OTHERS, known, modes_page
from rich.console import Console

from nwor_bench.live.drift import MAX_KEPT, MIN_SPANS, RATES, OverTime
from nwor_bench.live.reading import FELT_METRICS, Reading, reading_of
from nwor_bench.live.text import document, result
from nwor_bench.live.watch import Ended, Seen, Wanted, WidthRule, watch
from nwor_bench.records.window_order import ALL
from nwor_bench.report.document import Definitions
from nwor_bench.report.terminal import print_document

HOUR = 3600.0


def readings(
    seed: int, *, hours: float = 8, acceptance: float = 0.0, speed: float = 0.0, every_s: float = 30
) -> Iterator[tuple[float, Sequence[float]]]:
    """A server's readings: k = 4, acceptance of 0.6, 8 requests; both drift by these fractions."""
    random, counts = np.random.default_rng(seed), np.zeros(3)
    steps = int(hours * HOUR / every_s)
    for step in range(steps):
        windows = random.poisson(10 * every_s * (1 + speed * step / steps))
        accepted = random.binomial(4 * windows, 0.6 * (1 + acceptance * step / steps))
        counts += (4 * windows, accepted, windows + accepted)
        yield step * every_s, (*counts, float(random.poisson(8)))


def over(given_readings: Iterator[tuple[float, Sequence[float]]]) -> OverTime:
    taken = OverTime()
    for at_s, counted in given_readings:
        taken.add(at_s, counted)
    return taken


def found(taken: OverTime) -> dict[str, bool]:
    return {drift.what: drift.trend.matters for drift in taken.drifts()}


def test_a_planted_drift_is_found_and_its_size() -> None:
    for seed in range(10):
        fell = {drift.what: drift for drift in over(readings(seed, acceptance=-0.05)).drifts()}
        assert fell["acceptance_rate"].trend.matters
        assert fell["acceptance_rate"].trend.drift == pytest.approx(-0.05, abs=0.01)
        assert fell["acceptance_rate"].first == pytest.approx(0.6 * (1 - 0.05 / 6), rel=0.01)
        assert fell["acceptance_rate"].last == pytest.approx(0.6 * (1 - 0.05 * 5 / 6), rel=0.01)
        slower = {drift.what: drift for drift in over(readings(seed, speed=-0.2)).drifts()}
        of_median = -0.2 / 0.9
        assert slower["tokens_per_s"].trend.drift == pytest.approx(of_median, abs=0.03)
        assert not slower["acceptance_rate"].trend.matters
        assert slower["tokens_per_s"].trend.matters


def test_without_drift_one_in_twenty_at_most() -> None:
    told = [matters for seed in range(60) for matters in found(over(readings(seed))).values()]
    assert len(told) == 60 * len(RATES)
    assert sum(told) <= len(told) / 20


def test_a_day_of_a_reading_a_second_is_a_few_hundred_readings() -> None:
    taken = OverTime()
    for second in range(86_400):
        taken.add(float(second), (4.0 * second, 2.0 * second, 3.0 * second, 8.0))
    times = [kept[0] for kept in taken.kept]
    assert MAX_KEPT / 2 < len(times) <= MAX_KEPT
    assert times[0] == 0
    apart = {later - earlier for earlier, later in pairwise(times)}
    assert len(apart) == 1
    assert times[-1] > 86_400 - 2 * max(apart)
    shown = {drift.what: (drift.first, drift.last) for drift in taken.drifts()}
    assert shown == {
        "acceptance_rate": (0.5, 0.5), "tokens_per_s": (3, 3), "requests_running": (8, 8),
    }  # fmt: skip


STEPS = st.lists(
    st.tuples(st.floats(0.1, 600), st.integers(0, 50), st.integers(0, 40), st.booleans()),
    min_size=1, max_size=700,
)  # fmt: skip


@given(STEPS)
@examples(40)
def test_kept_readings_are_few_in_order_and_never_fall(
    steps: list[tuple[float, int, int, bool]],
) -> None:
    taken, now, counts, grown = OverTime(), 0.0, np.zeros(3), np.zeros(3)
    taken.add(now, (0, 0, 0, 1))
    for seconds, drafts, accepted, restarts in steps:
        now += seconds
        more = np.array([drafts, min(accepted, drafts), 0 if not drafts else drafts + 1])
        restarts = restarts and bool((counts > more).any())
        counts = more.astype(float) if restarts else counts + more
        grown += 0 if restarts else more
        taken.add(now, (*counts, 1.0))
        taken.add(now, (*counts, 1.0))  # shown again while the server does not answer
    kept = np.array(taken.kept)
    assert len(kept) <= MAX_KEPT
    assert (np.diff(kept[:, 0]) > 0).all()
    assert (np.diff(kept, axis=0) >= 0).all()
    assert (kept[-1, 1:4] <= grown).all()
    if kept[-1, 0] == now:
        assert kept[-1, 1:4].tolist() == grown.tolist()
    assert (kept[:, 5] <= kept[:, 0] + 1e-6).all()
    assert kept[:, 4] == pytest.approx(kept[:, 5])


def test_restarts_and_idle_hours_are_no_drift() -> None:
    taken, begun = OverTime(), (0.0, np.zeros(3))
    for step, (_, counted) in enumerate(readings(4)):
        if step in (300, 301, 600):  # counters begin at 0 again
            begun = (0.0, np.array(counted[:3]))
        taken.add(30.0 * step, (*(np.array(counted[:3]) - begun[1]), counted[3]))
    last = np.array(counted[:3]) - begun[1]
    for later in range(1, step):
        taken.add(30.0 * (step + later), (*last, 0.0))  # the night
    assert set(found(taken).values()) == {False}
    rates = {drift.what: drift for drift in taken.drifts()}
    assert rates["tokens_per_s"].last == pytest.approx(rates["tokens_per_s"].first, rel=0.02)
    assert rates["requests_running"].last == pytest.approx(8, abs=1)


def test_too_few_readings_say_nothing() -> None:
    assert over(readings(0, hours=MIN_SPANS * 30 / HOUR)).drifts() == []
    assert OverTime().drifts() == []
    silent = OverTime()
    for second in range(100):
        silent.add(second, (4.0 * second, 0.0, second, 1.0))  # a drafter that never hits
    assert "acceptance_rate" not in found(silent)


def page(counted: Sequence[float], of: str) -> str:
    """A server's page with vLLM's own counters, of two engines."""
    names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
             "generation_tokens_total", "num_requests_running")  # fmt: skip
    lines = [
        f'vllm:{name}{{engine="{engine}",model_name="m"}} {value * share}'
        for name, value in zip(names, counted, strict=True)
        for engine, share in enumerate((0.25, 0.75))
    ]
    other = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 7.0'
    return "\n".join([of.rstrip(), *lines, other, ""])


def test_vllms_counters_are_read_and_summed_over_engines() -> None:
    of = DRAFTS.replace(OTHERS, "")
    assert reading_of(page((40, 20, 30, 8), of), "http://h/metrics").counted == [40, 20, 30, 8]
    assert reading_of(DRAFTS, "http://h/metrics").counted is None


def seen(of: str, **planted: float) -> Seen:
    """A watch of eight hours on a clock of its own, until the time is up."""
    left, now = readings(1, every_s=60.0, **planted), [0.0]

    def read() -> Reading:
        return reading_of(page(next(left)[1], of), "http://h/metrics")

    def sleep(_: float) -> None:
        now[0] += 60.0

    return watch(
        read, Wanted(ALL, 0.0, 7.9 * HOUR), lambda *_: None, sleep=sleep, clock=lambda: now[0]
    )


@pytest.mark.parametrize("of", [known((0.97, 0.9699, 0.9701)), DRAFTS, modes_page()])
def test_the_answer_says_what_drifted(of: str, capsys: pytest.CaptureFixture[str]) -> None:
    for acceptance in (-0.08, 0.0):
        watched = seen(of, acceptance=acceptance)
        assert watched.waited_s == pytest.approx(7.9 * HOUR, abs=60)  # width 0 never ends it
        print_document(Console(width=80), document(watched, Wanted(ALL, 0.0, 9.0)))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        words = " ".join(text.split())
        change = "-7.5 %" if acceptance else "no drift found"
        assert f"over time acceptance_rate {change} in 7:54:00; first third 0." in words
        assert "over time requests_running no drift found in 7:54:00; first third " in words
        told = result(watched, Wanted(ALL, 0.0, 9.0), "http://h", 0)["drift"]
        assert {entry["what"]: entry["drifted"] for entry in told} == {
            "acceptance_rate": acceptance < 0, "tokens_per_s": acceptance < 0,
            "requests_running": False,
        }  # fmt: skip


def test_a_width_of_0_is_never_narrow_enough() -> None:
    rule = WidthRule(0.0)
    assert not any(rule.is_met(groups, 1e-9) for groups in range(100, 100_000, 100))


def test_what_users_feel_is_told_of_the_watch() -> None:
    """Growth since the first reading; nothing of a restarted server, or without such metrics."""
    reading = reading_of(DRAFTS, "http://h/metrics")
    wanted = Wanted(ALL, 0.0, 60.0)

    def facts(before: Sequence[float] | None, after: Sequence[float] | None) -> dict[str, str]:
        first, last = (replace(reading, felt=felt) for felt in (before, after))
        watched = Seen(last, Ended.TIME, 20.0, first=first)
        blocks = document(watched, wanted).lead
        (told,) = (block for block in blocks if isinstance(block, Definitions))
        return dict(told.entries)

    before = (1000.0, 400.0, 10.0, 2.0, 500.0)
    after = (3000.0, 900.0, 50.0, 6.0, 8500.0)
    words = "400 tokens/s with prefills and pauses, mean TTFT 100 ms, prefix hits 25 %"
    assert facts(before, after)["server"] == words
    for pair in ((after, before), (before, before), (None, None)):
        assert "server" not in facts(*pair)
    names = dict(zip(FELT_METRICS, after, strict=True))
    text = "\n".join(
        f'{name}{{engine="{e}"}} {value / 2}' for name, value in names.items() for e in "01"
    )
    assert reading_of(f"{DRAFTS}\n{text}\n", "http://h/metrics").felt == list(after)
