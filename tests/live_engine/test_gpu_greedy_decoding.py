"""What the tie rule asks of vLLM on a GPU (runner V2), and whole runs in bfloat16 by that rule."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from nwor_bench.errors import BenchError, ExitCode
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import TieCheck
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.config import load_scenario, resolve

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


@pytest.mark.parametrize("mode", [EAGER, FULL], ids=["eager", "full"])
@pytest.mark.usefixtures("environment_given_back")
def test_a_sound_run_in_bfloat16_passes(tmp_path: Path, mode: dict[str, Any]) -> None:
    """Real weights: differing tokens, if any, are ties; what was checked stands in run.json."""
    try:
        resolve_pair("smollm2")
    except BenchError as error:
        pytest.skip(f"smollm2 cannot be fetched here: {error}")
    overrides = {"requests": 8, "batches": 3, "max_new_tokens": 128}
    spec = resolve(
        load_scenario("short"), **overrides, dtype="bfloat16", engine_args=json.dumps(mode)
    )
    code = run_one(spec, PairChoice(pair="smollm2"), RunOptions(output=tmp_path / "run"))
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["parity"]["broken"] == {}
    assert code is ExitCode.OK
    assert run["parity"]["rule"] == "explained"
    ties = run["parity"]["ties"]
    if ties is not None:
        assert ties["error_positions"] == 128
        assert ties["error_positions_within_allowance"] < 64
        assert ties["tokens_compared"] > 0
