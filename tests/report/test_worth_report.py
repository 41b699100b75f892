"""What is said of draft counts: the sentence, and the line for vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import make_run

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.worth import Rate, Worth
from nwor_bench.records.header import PairFacts, RunHeader
from nwor_bench.records.types import Verdict
from nwor_bench.report import worth as report

pytestmark = pytest.mark.slow  # imports pandas and scipy


def rate(requests: int, k: int, ratio: float | None, verdict: Verdict) -> Rate:
    bounds = (None, None) if ratio is None else (ratio - 0.1, ratio + 0.1)
    return Rate(requests, k, ratio, *bounds, str(verdict), 1.0, 2.0, 5)


def worth(rates: Sequence[Rate], best: Mapping[int, int]) -> Worth:
    return Worth(tuple(rates), best, 5, {})


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
        (worth([rate(1, 2, None, OPEN)], {1: 0}), OPEN, None),
    ],
)
def test_the_sentence(
    monkeypatch: pytest.MonkeyPatch, found: Worth, badge: Verdict, words: str | None
) -> None:
    monkeypatch.setattr(report, "measured_worth", lambda _: found)
    answer = report.worth_answer([])
    assert answer.badge == badge
    if words is None:
        assert "Measure longer" in answer.sentence
    else:
        assert answer.sentence == words


def test_a_broken_count_is_the_answer() -> None:
    sound = analyse(make_run())
    cells = tuple(
        replace(cell, verdict="INVALID", reason="it changed the output") for cell in sound.cells
    )
    answer = report.worth_answer([replace(sound, cells=cells)])
    assert answer.badge == "INVALID"
    assert "it changed the output" in answer.sentence


HEADER = RunHeader(pair=PairFacts(method="eagle", draft="/d", speculative={"a": 1}))


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
    found = report.speculative_config(worth([], best), HEADER)
    models = {"a": 1, "method": "eagle", "model": "/d"}
    assert found == (None if config is None else {**models, **config})
