"""Tokens of a window by draft count: those that requests got, each prompt once."""

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from synthetic_run import make_run

from nwor_bench.analysis.draft_tokens import PromptTokens, Request, expected_tokens, requests_of
from nwor_bench.analysis.engine_times import steps_of
from nwor_bench.analysis.groups import Pair
from nwor_bench.analysis.invariants import output_tokens
from nwor_bench.analysis.worth import Measured, worth_of
from nwor_bench.records.cell import Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.header import BlockEntry, PairFacts, StoredSpec
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase, RequestTimes
from nwor_bench.stats.interval import t_quantile

KEPT = Path(__file__).parents[2] / "sweeps" / "results" / "kept"


def generated(rng: np.random.Generator, reach: Sequence[float], most: int) -> tuple[int, int, int]:
    """Windows of a request of `most` tokens, the accepted drafts, and those that it got.

    Args:
        reach: share of windows that accept draft 1, 2, ... and all before it.
    """
    accepted = (rng.random(most - 1)[:, None] < np.array(reach)).sum(axis=1).cumsum()
    windows = 1 + int(np.argmax(accepted + np.arange(1, most) >= most - 1))
    return windows, int(accepted[windows - 1]), most - 1 - windows


def reached(ease: float, k: int) -> list[float]:
    return [ease**draft for draft in range(1, k + 1)]


def cell(k: int) -> Cell:
    return Cell("tiny", NworMode.OFF, ScvMode.OFF, Drafts(k))


def whole_batch(
    k: int, made: Sequence[tuple[int, int, int]], most: int, step: float = 1.0, **more: Any
) -> Any:
    """A whole batch of these requests, a step of which takes so many ms."""
    got = [(most, drafts) for _, _, drafts in made] if k else [(most, 0) for _ in made]
    tpot = tuple(step * (tokens - 1 - drafts) / (tokens - 1) for tokens, drafts in got)
    values = {
        "cell": cell(k), "phase": Phase.TIMED, "block": 1, "requests": len(made),
        "output_tokens": most * len(made), "request_times": RequestTimes((), tpot),
        "token_digests": [f"text {n}" for n in range(len(made))],
        "request_acceptance": [(w, a) if k else (0, 0) for w, a, _ in made],
        "request_tokens": got,
    }  # fmt: skip
    return SimpleNamespace(**values | more)


def run_of(batches: Sequence[Any], blocks: Any = None, **scenario: Any) -> Any:
    spec = StoredSpec(engines=True)
    header = SimpleNamespace(scenario=scenario, spec=spec, pair=PairFacts(), blocks=blocks)
    finished = frozenset((batch.phase, batch.block) for batch in batches)
    return SimpleNamespace(batches=batches, header=header, finished=finished, windows=())


STEPS = {0: 1.0, 1: 1.1, 4: 1.6}
"""Time of a step in ms, by draft count."""


def test_both_ways_give_the_tokens_per_s_that_requests_had() -> None:
    """24 tokens a request. Engines' times are vLLM's per output token, those of groups a window's.
    Without noise both rates are the ratio of times per output token, whatever was accepted."""
    rng, most = np.random.default_rng(0), 24
    batches, per_token = [], {}
    for k, step in STEPS.items():
        made = [generated(rng, reached(ease, k), most) for ease in (0.5, 0.7, 0.8, 0.9)]
        batches += [whole_batch(k, made, most, step, block=block) for block in (1, 2, 3)]
        per_token[k] = np.mean(batches[-1].request_times.tpot_ms)
        if k == 4:  # by accepted drafts a window would have a twentieth more
            assert sum(1 + a / w for w, a, _ in made) > 1.04 * sum(1 + g / w for w, _, g in made)
    engines = run_of(batches, requests=4, max_new_tokens=most)
    interleaved = run_of(batches, requests=4, max_new_tokens=most)
    interleaved.header.spec = StoredSpec()
    effects: Any = [
        SimpleNamespace(
            pair=Pair(cell(0), cell(k)), clock="wall_ms",
            groups=[SimpleNamespace(num_reqs=4, host=log(STEPS[k]), device=None)] * 12,
        )
        for k in (1, 4)
    ]  # fmt: skip
    for own in (Measured(engines, ()), Measured(interleaved, effects)):
        for rate in worth_of([own]).rates:
            assert rate.ratio.value == pytest.approx(per_token[0] / per_token[rate.drafts])
            assert rate.time_ratio == pytest.approx(STEPS[rate.drafts])


def test_steps_of_a_kept_run_have_all_its_tokens_and_no_more() -> None:
    """By accepted drafts it would have 2.1 % more. An older one has no `request_tokens`."""
    run = read_run(KEPT / "llama-3b-shape-ctx-1k")
    whole = [batch for batch in run.batches if batch.phase in (Phase.GATE, Phase.TIMED)]
    assert len(whole) == 32
    for batch in whole:
        for own in (batch, replace(batch, request_tokens=None)):
            steps = steps_of(run.header, own)
            assert sum(map(sum, steps)) == pytest.approx(batch.output_tokens - batch.requests)
            assert [number for number, _ in steps] == [n for n, _ in batch.request_acceptance]
    sampled = sum(map(sum, (own for b in whole for own in b.request_acceptance)))
    assert sampled / sum(b.output_tokens - b.requests for b in whole) == pytest.approx(
        1.021, abs=4e-3
    )


def test_a_windows_output_has_no_tokens_behind_a_requests_last_one() -> None:
    """One of four requests had finished, with 3 of its 4 drafts accepted. The others accept 5."""
    window = replace(
        make_run().windows[0], num_reqs=4, draft_tokens=16, staged_tokens=0, accepted_tokens=8,
        uncounted_draft_tokens=4, uncounted_accepted_tokens=3, undelivered_tokens=2,
    )  # fmt: skip
    assert output_tokens(window) == 3 + 3
    assert output_tokens(replace(window, undelivered_tokens=None)) == 3 + 5  # an older run


@pytest.mark.parametrize(("temperature", "texts"), [(0.0, 4), (0.8, 2)])
def test_the_greedy_gate_gives_no_tokens_of_sampled_requests(
    temperature: float, texts: int
) -> None:
    batches = [
        whole_batch(k, [(9, 2, 2)] * 2, 12, phase=phase)
        for phase in (Phase.GATE, Phase.TIMED)
        for k in (0, 1)
    ]
    run = run_of(batches, temperature=temperature, max_new_tokens=12)
    assert len(list(requests_of(run, [1]))) == texts


@pytest.mark.parametrize(("k", "most"), [(1, 2), (2, 24), (4, 24), (4, 192)])
def test_named_rates_give_the_tokens_of_requests_that_long(k: int, most: int) -> None:
    rates, rng = [0.75, 0.56, 0.42, 0.32][:k], np.random.default_rng(k)
    simulated = [generated(rng, rates, most)[0] for _ in range(1000)]
    error = np.std(simulated) / 1000**0.5 / np.mean(simulated)
    expected = (most - 1) / np.mean(simulated)
    assert expected_tokens(rates, most) == pytest.approx(expected, rel=4 * error + 1e-9)
    assert expected_tokens(rates, most) < expected_tokens(rates, None) == 1 + sum(rates)
    run = run_of([whole_batch(k, [(9, 2, 2)], 12)], requests=1, max_new_tokens=most)
    named = {"synthetic_acceptance_rates": rates}
    run.header.spec = StoredSpec(engines=True, speculative_config=named)
    (rate,) = worth_of([Measured(run, ())]).rates
    assert rate.tokens == pytest.approx(expected_tokens(rates, most))


def test_batches_cut_short_count_as_if_they_went_on() -> None:
    """64 tokens ran and the scenario has 192: a window has what requests of 192 tokens get, and
    neither what those of 64 get (2 % less) nor what is accepted without end (0.6 % more)."""
    rng, k = np.random.default_rng(0), 4
    rates, number = [0.75, 0.56, 0.42, 0.32], 3000
    made = [generated(rng, rates, 64) for _ in range(number)]
    batches = [whole_batch(each, made, 64) for each in (0, k)]
    expected = expected_tokens(rates, 192)
    for most, truth in ((192, expected), (64, expected_tokens(rates, 64))):
        run = run_of(batches, max_new_tokens=most)
        found = PromptTokens(requests_of(run, [k]), [k], {}).mean(k)
        assert found == pytest.approx(truth, rel=2e-3)
    stopped = whole_batch(k, made, 64)
    stopped.request_tokens = [(30, 10), *stopped.request_tokens[1:]]
    (first, *_) = requests_of(run_of([batches[0], stopped], max_new_tokens=192), [k])
    assert first[1][k] == (19, 10)  # it ended with a stop


def test_a_prompt_is_known_by_its_place_in_the_plan() -> None:
    """In bf16 it may give another text at another batch size: it stays one prompt."""
    made = [(10, 14, 13), (12, 12, 11)]
    batches = [whole_batch(k, made, 24, phase=Phase.GATE, block=0) for k in (0, 4)]
    plan = (BlockEntry(block=0, prompt_ids=("chat-1", "code-7")),)
    forked = [whole_batch(k, made, 24, phase=Phase.GATE, block=0) for k in (0, 4)]
    for batch in forked:
        batch.token_digests = ["another", "text"]
    runs = [run_of(own, plan) for own in (batches, forked)]
    requests = [each for run in runs for each in requests_of(run, [4])]
    assert [prompt for prompt, _ in requests] == ["chat-1", "code-7"] * 2
    assert len(PromptTokens(requests, [4], {})) == 2
    without = [each for own in (batches, forked) for each in requests_of(run_of(own), [4])]
    assert len(PromptTokens(without, [4], {})) == 4


def test_a_prompt_weighs_once_however_often_it_ran() -> None:
    own = {"easy": (10.0, 30.0), "hard": (20.0, 2.0)}
    once = PromptTokens([(name, {2: counts}) for name, counts in own.items()], [2], {})
    often = [("hard", {2: (18.0, 4)}), ("hard", {2: (22.0, 0)}), ("easy", {2: own["easy"]})]
    assert PromptTokens(often, [2], {}).mean(2) == once.mean(2) == pytest.approx(1 + 32 / 30)


COUNTS = (1, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "forks"), [(40, 1.0), (12, 0.5)])
def test_intervals_hold_if_prompts_run_at_four_batch_sizes(prompts: int, forks: float) -> None:
    """Copies of a prompt share its ease, whether or not their text forks. All counts together, as
    intervals hold for all of them; by different texts 0.69 to 0.82 of them do."""
    most, shape = 65, (6, 3)
    made = np.random.default_rng(9)
    truth = {}
    for k in COUNTS:
        all_ = [generated(made, reached(ease, k), most) for ease in made.beta(*shape, 1000)]
        truth[k] = log((most - 1) * len(all_) / sum(windows for windows, _, _ in all_))
    hits, runs = 0, 50
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        requests: list[Request] = []
        for number, ease in enumerate(rng.beta(*shape, prompts)):
            own: dict[int, tuple[float, ...]] = {}
            for copy in range(4):
                if not copy or rng.random() < forks:
                    all_ = {k: generated(rng, reached(ease, k), most) for k in COUNTS}
                    own = {k: (windows, got) for k, (windows, _, got) in all_.items()}
                requests.append((str(number), own))
        found = {k: PromptTokens(requests, COUNTS, {}).difference(k, 0) for k in COUNTS}
        hits += all(
            own is not None
            and abs(own.value - truth[k])
            < t_quantile(1 - 0.05 / 2 / len(COUNTS), own.degrees) * own.error
            for k, own in found.items()
        )
    assert hits / runs > 0.88
