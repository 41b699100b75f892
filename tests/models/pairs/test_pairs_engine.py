"""In real vLLM: the noise of a generated drafter sets the acceptance."""

import os
from pathlib import Path

import pytest

from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.models.pairs.tiny import generate_tiny

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPTS = ["What is the capital of France?", "def add(a, b):\n    return", "once upon a time"]


def acceptance(pair: ResolvedPair) -> float:
    """Share of drafts accepted over 64 greedy tokens a prompt."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=pair.target,
        dtype=pair.dtype,
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        disable_log_stats=False,
        speculative_config=pair.speculative_config(4),
    )
    sampling = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    assert all(len(set(o.outputs[0].token_ids)) > 10 for o in outputs), "degenerate output"
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    assert drafted > 0
    llm.llm_engine.engine_core.shutdown()
    return counters["vllm:spec_decode_num_accepted_tokens"] / drafted


@pytest.mark.parametrize(
    ("noise", "low", "high"), [(0.0, 0.95, 1.0), (0.05, 0.3, 0.9), (5.0, 0, 0.1)]
)
def test_noise_sets_the_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, low: float, high: float
) -> None:
    monkeypatch.setitem(os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setitem(os.environ, "VLLM_USE_V2_MODEL_RUNNER", "0")
    target, draft = generate_tiny(tmp_path, noise=noise)
    pair = ResolvedPair("tiny", "draft_model", str(target), str(draft), "float32")
    assert low <= acceptance(pair) <= high
