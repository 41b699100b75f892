"""What the tie rule asks of vLLM on a GPU (runner V2), and whole runs in bfloat16 by that rule."""

import json
from collections.abc import Iterator

import pytest
from engine_tools import EAGER, FULL, run_cell, tiny_pair, tiny_spec
from test_requests_and_logprobs import (
    MIXED,
    check_log_probabilities,
    check_measured_batches,
    reference_logprobs,
    target_of,
)

from nwor_bench.analysis.parity.ties import Place
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import TieCheck

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

OFF = Cell("tiny", NworMode.OFF, ScvMode.OFF)


@pytest.fixture(scope="module", params=[EAGER, FULL], ids=["eager", "full"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """The tiny pair in float32, so that log probabilities can be compared closely."""
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model", noise=0.2)
    started = VllmEngine(pair, tiny_spec(draft_tokens=4, engine_args=json.dumps(request.param)))
    yield started
    started.close()


@pytest.mark.parametrize("nwor", ["off", "stage"])
def test_log_probabilities_are_the_models_own(engine: VllmEngine, nwor: str) -> None:
    check_log_probabilities(engine, nwor, ScvMode.GRAPH, 2e-3)


@pytest.mark.parametrize("nwor", ["off", "stage"])
def test_measured_batches_do_not_see_what_was_asked(engine: VllmEngine, nwor: str) -> None:
    check_measured_batches(engine, nwor)


def test_the_check_tells_a_gap_from_a_tie(engine: VllmEngine) -> None:
    reference = run_cell(engine, "off", "off", MIXED, max_new_tokens=20).token_ids
    ties = TieCheck(engine, OFF, lambda: MIXED, 20, ignore_eos=True)
    row = reference_logprobs(target_of(engine), [*MIXED[1], *reference[1][:5]])[-1]
    second = int(row.topk(2).indices[1])
    (verdict,) = ties.check(MIXED, reference, [Place(1, 5, reference[1][5], second)])
    assert verdict.gap == pytest.approx(float(row[reference[1][5]] - row[second]), abs=2e-3)
    assert not verdict.is_tie
    stage = Cell("tiny", NworMode.STAGE, ScvMode.GRAPH)
    assert ties.go_on(stage, MIXED, reference, {1: 6}) == {1: reference[1][6:]}
