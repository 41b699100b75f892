"""The tie rule on SmolLM2 in bf16: the second-best token of each near-tie is no sound cell's."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from engine_tools import smollm2_on_short, tiny_spec, worker_of
from planted_parts import second_best

from nwor_bench.analysis.parity.ties import MAX_GAP, together_outside
from nwor_bench.analysis.parity.tokens import EXACT, EXPLAINED, INVALID, check_tokens
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import CPU_POSITIONS, TieCheck

pytestmark = [pytest.mark.engine, pytest.mark.long]

REQUESTS, TOKENS = 8, 40
OFF, STAGE = (Cell("smollm2", mode, ScvMode.OFF) for mode in (NworMode.OFF, NworMode.STAGE))


@pytest.mark.parametrize("planted", [False, True])
def test_a_near_second_best_token_is_refused(
    start_alone: Callable[..., VllmEngine], planted: bool
) -> None:
    """Each token is nearly a tie by itself: a rounding step of attention moves more. Sound cells on
    a CPU have mode off's own kernel, and no other token."""
    pair, prompts = smollm2_on_short("smollm2", REQUESTS)
    engine = start_alone(pair, tiny_spec(requests=REQUESTS, dtype="bfloat16", kv_cache_gib=0.5))
    lengths = [TOKENS] * REQUESTS
    ties = TieCheck(engine, OFF, lambda: prompts, TOKENS, ignore_eos=True, positions=CPU_POSITIONS)
    engine.set_modes(OFF)
    reference = [o.token_ids for o in engine.decode_greedily(prompts, lengths, ignore_eos=True)]
    with second_best(worker_of(engine)) if planted else nullcontext():
        engine.set_modes(STAGE)
        answers = [o.token_ids for o in engine.decode_greedily(prompts, lengths, ignore_eos=True)]
        found = check_tokens(STAGE, prompts, answers, reference, ties, to_the_end=True)
    if not planted:
        assert found.comparison.parity == EXACT
        assert found.tokens_compared == REQUESTS * TOKENS
        return
    if found.comparison.parity == INVALID:  # processors round differently: one was no tie by itself
        return
    assert found.comparison.parity == EXPLAINED
    assert found.tokens_compared == REQUESTS * TOKENS
    assert found.largest_gap is not None
    assert 0.2 < found.largest_gap < MAX_GAP
    assert ties.measured is not None
    gaps = [verdict.gap or 0.0 for verdict in found.verdicts]
    assert "too many together" in (
        together_outside(gaps, ties.measured, found.tokens_compared) or ""
    )
