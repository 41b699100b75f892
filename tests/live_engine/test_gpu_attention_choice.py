"""Real vLLM on a GPU: what attends windows is timed once, read again, and forced by a setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import FULL_FOR_ALL, pair_with, prompts_of, run_cell, tiny_spec

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PROMPTS = prompts_of([60, 21, 90, 33, 61, 50, 40, 77])
SHAPES = {
    "dense": ("llama-1b-shape", {"num_key_value_heads": 4, "head_dim": 128}),
    "latent": ("mla-shape", {}),
}


def start(
    shape: str, attention: str, folder: Path, start_alone: Callable[..., VllmEngine]
) -> VllmEngine:
    name, settings = SHAPES[shape]
    pair: ResolvedPair = pair_with(name, settings | {"num_hidden_layers": 4}, folder)
    arguments = {**FULL_FOR_ALL, "load_format": "dummy"}
    spec = tiny_spec(draft_tokens=4, attention=attention, max_model_len=4096,
                     kv_cache_gib=1, dtype="bfloat16", engine_args=arguments)  # fmt: skip
    return start_alone(pair, spec)


def reasons(engine: VllmEngine) -> set[str | None]:
    """Why windows that stage is asked for were written directly, uneven ones left out."""
    windows = run_cell(engine, "stage", "off", PROMPTS).windows
    return {window.fallback_reason for window in windows} - {"full_graph_with_uneven_windows"}


def facts_of(engine: VllmEngine) -> Any:
    return engine.status().cuda_graphs


@pytest.mark.parametrize("shape", SHAPES)
def test_the_choice_is_timed_once_and_read_again(
    shape: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    from nwor_bench.plugin.runner_v2 import attention_choice
    from nwor_bench.plugin.runner_v2.attention_timing import AttentionTiming

    # What is measured beside another process, or at a lowered clock, is measured again.
    monkeypatch.setattr(attention_choice, "_is_disturbed", lambda choice: False)
    monkeypatch.setenv("NWOR_BENCH_CACHE", str(tmp_path / "cache"))
    first = start(shape, "auto", tmp_path / "first", start_alone)
    assert reasons(first) <= {None, "slower_than_stock"}
    facts = facts_of(first)
    record_property("attention", facts.attention)
    record_property("times", facts.attention_us)
    assert facts.attention
    for of_size in facts.attention_us.values():
        ((_, times),) = of_size.items()
        assert times.keys() >= {"context", "stock", "ours", "merge"}
    staged = [size for size, how in facts.attention.items() if how != "stock"]
    assert len(facts.stage_window_sizes) == len(staged)
    first.close()

    def untimed(*_: Any) -> None:
        pytest.fail("it was stored")

    monkeypatch.setattr(AttentionTiming, "times", untimed)
    again = start(shape, "auto", tmp_path / "again", start_alone)
    assert reasons(again) <= {None, "slower_than_stock"}
    assert facts_of(again).attention == facts.attention


@pytest.mark.parametrize(
    ("attention", "expected"), [("merge", {None}), ("stock", {"stock_attention"})]
)
def test_a_setting_forces_one(
    attention: str,
    expected: set[str | None],
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
) -> None:
    engine = start("dense", attention, tmp_path, start_alone)
    assert reasons(engine) == expected
    assert not facts_of(engine).attention


def test_a_gate_stages_what_its_short_contexts_would_leave_to_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_alone: Callable[..., VllmEngine]
) -> None:
    """Made-up times: ours loses at 1,024 tokens, and gains at the longest context."""
    from nwor_bench.plugin.runner_v2.attention_decision import Contender
    from nwor_bench.plugin.runner_v2.attention_timing import AttentionTiming

    def times(self: Any, size: Any, length: int) -> dict[Contender, list[float]]:
        ours = 2e-5 if length <= 1024 else 1e-6
        return {Contender.STOCK: [1e-5] * 3, Contender.OURS: [ours] * 3}

    monkeypatch.setenv("NWOR_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(AttentionTiming, "times", times)
    engine = start("dense", "auto", tmp_path, start_alone)
    assert reasons(engine) == {"slower_than_stock"}
    cache = engine.kv_cache()
    cache.watch(True)
    engine.check_layers(8)
    try:
        windows = run_cell(engine, "stage", "off", PROMPTS, max_new_tokens=120).windows
    finally:
        checked = engine.check_layers(None)
        cache.watch(False)
    found = [window.fallback_reason for window in windows]
    assert {None, "slower_than_stock"} <= set(found)
    assert found.count(None) > found.count("slower_than_stock")
    assert sum(window["path"] == "full graph" for window in checked[0]) == 2
    assert reasons(engine) == {"slower_than_stock"}
