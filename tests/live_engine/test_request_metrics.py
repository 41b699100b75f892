"""TTFT, TPOT and ITL of a real engine's batch agree with each other and with its latency."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_tools import prompts_of, run_cell, tiny_pair, tiny_spec

from nwor_bench.engine.engine import VllmEngine

pytestmark = pytest.mark.engine


def test_vllms_request_metrics_are_each_batchs_own(
    start_engine: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    engine = start_engine(tiny_pair(tmp_path / "pair", "draft_model"), tiny_spec(requests=4))
    prompts = prompts_of([24, 150, 18, 40, 27, 22])  # two wait until others are done
    engine.decode_greedily(prompts, [20] * 6, ignore_eos=True)  # its steps must not be counted
    for mode in ("off", "stage"):
        output = run_cell(engine, mode, "off", prompts)
        times = output.request_times
        assert times is not None
        assert (len(times.ttft_ms), len(times.tpot_ms)) == (6, 6)
        lengths = [len(tokens) for tokens in output.token_ids]
        decoding = [tpot * (n - 1) for tpot, n in zip(times.tpot_ms, lengths, strict=True)]
        for first, rest in zip(times.ttft_ms, decoding, strict=True):
            assert 0 < first < first + rest <= output.latency_ms + 5
        assert max(times.ttft_ms) > 2 * min(times.ttft_ms)
        # A request's inter-token latencies add up to its time after the first token.
        latencies = zip(times.itl_ms, times.itl_counts, strict=True)
        assert sum(ms * n for ms, n in latencies) == pytest.approx(sum(decoding), abs=1.0)
        # Drafts were accepted, so there are fewer steps than tokens.
        assert 6 <= sum(times.itl_counts) < sum(lengths) - 6
