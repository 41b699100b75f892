"""The local gate on a CPU: sound layers pass, and each planted fault of one layer is seen."""

from typing import Any

import pytest
from engine_tools import prompts_of
from planted_layers import LAYER_FAULTS, LayerFault, check_a_batch, keep_sizes, smallest_seen

from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.engine.engine import VllmEngine

pytestmark = pytest.mark.engine

LENGTHS = [24, 31, 18, 40, 27, 22, 35, 29]
ON_CPU = [
    fault for fault in LAYER_FAULTS if "sliding" not in fault.name and "sinks" not in fault.name
]
SIZES: dict[str, float | None] = {}


@pytest.mark.parametrize("cell", [("stage", "off"), ("stage", "graph"), ("control", "off")])
def test_a_sound_batch_passes(engine: VllmEngine, cell: tuple[str, str]) -> None:
    found = check_a_batch(engine, prompts_of(LENGTHS), *cell)
    assert found.verdict is KvVerdict.WITHIN, found.reason
    assert found.layers == found.attended == found.whole_caches == 3
    assert found.windows == 2
    assert (found.rejected > 0) == (cell[0] == "stage")  # else no slot had to stay as it was
    assert found.written == found.layers * sum([2 * 8 * 5]) - found.layers * found.rejected


@pytest.mark.parametrize("fault", ON_CPU, ids=lambda fault: fault.name)
def test_a_fault_of_one_layer_is_seen_in_that_layer(engine: VllmEngine, fault: LayerFault) -> None:
    smallest, reason = smallest_seen(engine, prompts_of(LENGTHS), fault)
    SIZES[fault.name] = smallest
    assert smallest is not None
    assert smallest <= fault.must
    assert "local gate: model.layers.1.self_attn.attn" in reason
    keep_sizes("CPU, tiny pair, float32", SIZES)


def test_the_cache_is_left_as_the_commit_left_it(engine: VllmEngine) -> None:
    """A batch that was checked gives the tokens of one that was not."""
    from engine_tools import run_cell

    def tokens() -> Any:
        return run_cell(engine, "stage", "off", prompts_of(LENGTHS), 16).token_ids

    engine.check_layers(8)
    try:
        checked = tokens()
    finally:
        assert engine.check_layers(None)[0]
    assert checked == tokens()
