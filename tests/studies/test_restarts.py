"""Separate engines for each draft count: turns, workers, and the ratios of paired batches."""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest

Study = Callable[[str, str], ModuleType]

RATIO = {"0": 1.0, "1": 1.2, "2": 1.4, "plain": 0.9, "1/2": 1.26, "0/2": 1.03}
"""Planted time of a window over that of `0`."""

WORKER = """
import json, sys, os
arm, answers = sys.argv[-3], int(sys.argv[-1])
if arm == "absent":
    sys.exit(3)
os.write(answers, b'{"start_s": 1.0}\\n')
for line in sys.stdin:
    size, number = json.loads(line)
    if arm == "dies" and number == 1:
        sys.exit(4)
    found = {"windows": 10, "tokens": 10 * size, "seconds": os.getpid(), "start_s": 1.0}
    os.write(answers, json.dumps(found).encode() + b"\\n")
    print(arm, size, number, file=open("order.txt", "a"))
"""


def order_of(**changed: object) -> argparse.Namespace:
    """Arguments of a run."""
    usual = {"requests": [1, 8], "warmup": 1, "repetitions": 3, "at_once": True}
    return argparse.Namespace(**usual | changed)


def drifting(arms: list[str], repetitions: int = 12) -> pd.DataFrame:
    """Batches of a host whose speed doubles and halves between repetitions, windows of 1 ms."""
    draw = np.random.default_rng(1)
    rows = []
    for number in range(repetitions):
        host = 2.0 ** draw.uniform(-1, 1)
        for arm in arms:
            seconds = 0.1 * host * RATIO[arm] * np.exp(draw.normal(0, 0.002))
            tokens = 100 * 8 * (1 + int(arm[0] == "1"))  # every draft of `1` is accepted
            rows.append({"arm": arm, "requests": 8, "repetition": number, "windows": 100,
                         "tokens": tokens, "seconds": seconds})  # fmt: skip
    return pd.DataFrame(rows)


def said(ratio: float) -> pd.DataFrame:
    """What `worth` said of 1 draft, and of 0."""
    return pd.DataFrame({
        "requests": [8, 8], "drafts": [0, 1], "ratio": [None, ratio],
        "low": [None, ratio / 1.01], "high": [None, ratio * 1.01],
    })  # fmt: skip


def test_every_repetition_runs_all_arms_in_its_own_order(study: Study) -> None:
    """A size's warm-up comes before its repetitions; the order is random, the same in each run."""
    arms = ["plain", "0", "1", "2", "3", "1/4"]
    turns = list(study("worth", "restarts").turns(order_of(arms=arms)))
    wanted = [(size, number) for size in (1, 8) for number in (-1, 0, 1, 2)]
    assert [(size, number) for size, number, _ in turns] == wanted
    assert all(sorted(order) == sorted(arms) for *_, order in turns)
    assert len({tuple(order) for *_, order in turns}) == len(turns)
    assert turns == list(study("worth", "restarts").turns(order_of(arms=arms)))


def test_pairs_find_a_ratio_that_drift_hides(study: Study) -> None:
    """2 tokens in 1.2 times the time: 1.667, within 1 % if paired; otherwise the drift is in it."""
    agreement = study("worth", "agreement").agreement
    rows = drifting(["0", "1", "plain"])
    (paired,) = agreement(rows, said(2 / 1.2), [], True).to_dict("records")
    assert paired["agrees"]
    assert paired["restarts"] == pytest.approx(2 / 1.2, rel=0.005)
    assert paired["restarts_high"] / paired["restarts_low"] < 1.01
    assert paired["over_plain"] == pytest.approx(2 / 1.2 * 0.9, rel=0.005)
    (unpaired,) = agreement(rows, said(2 / 1.2), [], False).to_dict("records")
    assert unpaired["restarts_high"] / unpaired["restarts_low"] > 1.5


def test_a_difference_of_4_percent_does_not_agree(study: Study) -> None:
    """Without pairs the interval would be so wide that it does."""
    agreement = study("worth", "agreement").agreement
    rows = drifting(["0", "1"])
    assert not agreement(rows, said(1.04 * 2 / 1.2), [], True).agrees.any()
    assert agreement(rows, said(1.04 * 2 / 1.2), [], False).agrees.all()


@pytest.mark.parametrize(("share", "agrees"), [(0.9, True), (1.1, False), (-1.1, False)])
def test_agreement_is_by_the_root_of_the_sum_of_squares(
    study: Study, share: float, agrees: bool
) -> None:
    """Two intervals of +- 1 % are 1.41 % apart at most; added they would allow 2 %."""
    agreement = study("worth", "agreement").agreement
    rows = drifting(["0", "1"]).assign(seconds=lambda own: 0.1 * own.arm.map(RATIO))
    spread = np.tile([-1.0, 1.0], 6) * np.log(1.01)
    rows.loc[rows.arm == "1", "seconds"] *= np.exp(spread)
    (own,) = agreement(rows, said(2 / 1.2), [], True).to_dict("records")
    half = np.log(own["restarts_high"] / own["restarts_low"]) / 2
    allowed = (half**2 + np.log(1.01) ** 2) ** 0.5
    ratio = own["restarts"] * np.exp(share * allowed)
    (found,) = agreement(rows, said(ratio), [], True).to_dict("records")
    assert found["agrees"] == agrees
    assert (found["apart"], found["allowed"]) == pytest.approx((share * allowed, allowed))
    assert 1.1 * allowed < half + np.log(1.01)  # the sum would allow all of them


def test_pairs_are_of_the_same_repetition(study: Study) -> None:
    """Whatever the order of rows, and if an arm lacks some repetitions."""
    rows = drifting(["0", "1"], repetitions=14)
    lost = (rows.arm == "1") & rows.repetition.isin([0, 5])
    mixed = rows[~lost].sample(frac=1, random_state=2)
    (found,) = study("worth", "agreement").agreement(mixed, said(2), [], True).to_dict("records")
    assert found["restarts"] == pytest.approx(2 / 1.2, rel=0.005)
    assert np.isnan(found["over_plain"] or np.nan)


def test_settings_without_10_pairs_are_left_out(study: Study) -> None:
    """Also if an arm failed: the run goes on without it."""
    module = study("worth", "agreement")
    assert module.agreement(drifting(["0", "1"], repetitions=9), said(2), [], True).empty
    assert module.agreement(drifting(["1", "plain"]), said(2), [], True).empty
    assert module.schedule_cost(drifting(["1", "1/2"], repetitions=9), True).empty


def test_named_acceptance_gives_the_tokens(study: Study) -> None:
    """Not the tokens of the batches, which scatter."""
    rows = drifting(["0", "1"])
    (found,) = study("worth", "agreement").agreement(rows, said(2), [0.5], True).restarts
    assert found == pytest.approx(1.5 / 1.2, rel=0.005)


def test_times_per_token_of_servers_are_compared_as_batches_are(study: Study) -> None:
    """A quarter less time per token, with whatever a repetition's servers have in common."""
    shared = np.exp(np.random.default_rng(3).normal(0, 0.3, 12))
    rows = pd.DataFrame(
        {"arm": arm, "requests": 8, "repetition": n, "tpot_ms": 40 * part * each}
        for n, each in enumerate(shared)
        for arm, part in (("0", 1.0), ("1", 0.75))
    )
    (found,) = study("worth", "bench_serve").compare(rows, said(1 / 0.75)).to_dict("records")
    assert (found["requests"], found["drafts"], found["agrees"]) == (8, 1, True)
    assert found["restarts"] == pytest.approx(1 / 0.75)


def test_a_schedule_costs_what_its_engine_takes_over_the_fixed_count(study: Study) -> None:
    """`K/N` over `K`, `0/N` over `0`; `2/2` has no row if `2` did not run."""
    schedule_cost = study("worth", "agreement").schedule_cost
    rows = drifting(["plain", "0", "1", "1/2", "0/2"])
    alone = drifting(["2"]).assign(arm="2/2")
    table = schedule_cost(pd.concat([rows, alone]), True)
    assert list(table) == ["requests", "drafts", "arm", "ratio", "low", "high"]
    assert table[["requests", "drafts", "arm"]].values.tolist() == [[8, 0, "0/2"], [8, 1, "1/2"]]
    assert table.ratio.tolist() == pytest.approx([1.03, 1.26 / 1.2], rel=0.005)
    assert (table.low > 1).all()
    assert (schedule_cost(rows, False).low < 1).all()


@pytest.mark.parametrize(
    ("arm", "requests"), [("1/4", [8, 32]), ("0/4", [8]), ("4/4", [1, 8]), ("1/2", [1, 2])]
)
def test_a_schedule_drafts_its_count_at_measured_sizes_and_names_the_others(
    study: Study, arm: str, requests: list[int]
) -> None:
    """Each size has one count, and all counts from 0 to N are there."""
    restarts = study("worth", "restarts")
    k, most = map(int, arm.split("/"))
    largest = restarts.most_requests(requests, ["plain", arm])
    pair = SimpleNamespace(method="eagle", draft="drafter")
    found = restarts.speculation(pair, arm, [0.75, 0.56, 0.42, 0.32], largest, requests)
    assert found["num_speculative_tokens"] == len(found["synthetic_acceptance_rates"]) == most
    schedule = found["num_speculative_tokens_per_batch_size"]
    counts = {size: n for low, high, n in schedule for size in range(low, high + 1)}
    assert sorted(counts) == list(range(1, largest + 1))
    assert sum(high - low + 1 for low, high, _ in schedule) == largest
    assert {counts[size] for size in requests} == {k}
    assert set(counts.values()) == set(range(most + 1))


def test_engines_have_room_for_the_largest_batch(study: Study) -> None:
    """Only a schedule of several counts may need more."""
    most_requests = study("worth", "restarts").most_requests
    assert most_requests([1, 2], ["plain", "0", "4"]) == 2
    assert most_requests([8, 128], ["1", "1/4"]) == 128


@pytest.fixture
def restarts(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The study with stand-in workers, in a folder of its own."""
    found = study("worth", "restarts")
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(found, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr("sys.argv", ["restarts.py"])
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("at_once", [True, False])
def test_an_arm_that_fails_is_left_out_and_the_others_go_on(
    restarts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], at_once: bool
) -> None:
    """What it measured before is kept. No process is left."""
    arms = ["dies", "absent", "1/4", "0"]
    order = order_of(arms=arms, at_once=at_once, requests=[8], output=tmp_path)
    rows = restarts.measure(order)
    assert list(rows) == [
        "arm", "requests", "repetition", "windows", "tokens", "seconds", "start_s", "process_s",
    ]  # fmt: skip
    assert rows.groupby("arm").size().to_dict() == {"dies": 1, "1/4": 3, "0": 3}
    assert pd.read_csv(tmp_path / "restarts.csv", dtype={"arm": str}).equals(rows)
    printed = capsys.readouterr().out
    assert "dies: failed with 4" in printed
    assert "absent: failed with 3" in printed
    assert (tmp_path / "arm-1of4.log").exists()
    assert not any(Path(f"/proc/{process}").exists() for process in set(rows.seconds))
    ran = [line.split()[0] for line in (tmp_path / "order.txt").read_text().splitlines()]
    alone = [arm for arm in ran if arm in ("0", "1/4")]
    assert (alone == sorted(alone, reverse=True)) is not at_once


def test_all_workers_end_if_the_run_is_stopped(
    restarts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they measured is stored, the last round too."""
    run, batches = restarts.Worker.run, []

    def stopped_in_the_sixth_batch(worker: object, size: int, number: int) -> object:
        batches.append(number)
        if len(batches) == 6:
            raise SystemExit(143)
        return run(worker, size, number)

    monkeypatch.setattr(restarts.Worker, "run", stopped_in_the_sixth_batch)
    with pytest.raises(SystemExit):
        restarts.measure(order_of(arms=["0", "1"], output=tmp_path))
    rows = pd.read_csv(tmp_path / "restarts.csv")
    assert len(rows) == 3
    assert rows.seconds.nunique() == 2
    assert not any(Path(f"/proc/{process}").exists() for process in rows.seconds)
