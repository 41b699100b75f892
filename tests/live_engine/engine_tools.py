"""Generated models, prompts, and a way to run one cell on a real engine."""

import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.errors import BenchError
from nwor_bench.models.pairs import ResolvedPair, resolve_pair
from nwor_bench.models.pairs.tiny import TinyShape, generate_tiny
from nwor_bench.records.types import AA, Cell, NworMode, ScvMode, WindowRecord
from nwor_bench.records.window_order import WindowOrder, compared_pairs
from nwor_bench.workload.config import RunSpec, load_scenario, resolve
from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer

EAGER: dict[str, Any] = {"enforce_eager": True}
FULL: dict[str, Any] = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [5, 40],
    }
}
"""vLLM's arguments on a GPU: no CUDA graphs, or full ones for windows of 1 and 8 requests."""

FULL_FOR_ALL: dict[str, Any] = {
    "compilation_config": {**FULL["compilation_config"], "cudagraph_capture_sizes": [5, 10, 20, 40]}
}
"""Full CUDA graphs for windows of 1 to 8 requests, with little padding."""

GRAPHS: dict[str, dict[str, Any]] = {"eager": EAGER, "full": FULL_FOR_ALL}

PIECEWISE: dict[str, Any] = {
    "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 64]}
}
"""CUDA graphs of what lies between attention layers."""

SCV = ("off", "graph", "adaptive")
"""Every SCV mode."""

NGRAM = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}


def tiny_pair(folder: Path, method: str, noise: float = 0.05, layers: int = 3) -> ResolvedPair:
    """A generated pair in float32; for ngram without its drafter."""
    target, draft = generate_tiny(folder, TinyShape(layers=layers), noise=noise)
    if method == "ngram":
        return ResolvedPair("tiny", "ngram", str(target), None, "float32", NGRAM)
    return ResolvedPair("tiny", "draft_model", str(target), str(draft), "float32")


def pair_with(name: str, settings: dict[str, Any], folder: Path) -> ResolvedPair:
    """Pair `name` without weights, with more settings in its target's config.json."""
    base = resolve_pair(name, cache_dir=folder / "pair")
    target = folder / "model"
    shutil.copytree(base.target, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return replace(base, target=str(target))


def mtp_of(pair: ResolvedPair) -> ResolvedPair:
    """The pair's target, drafted for by its own layer; a set share of the drafts is accepted."""
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.6}
    return replace(pair, method="mtp", draft=None, speculative=synthetic)


OUR_ATTENTION = "ours" if torch.cuda.is_available() else "auto"
"""--attention with which windows are staged whatever is the fastest; a CPU has no choice."""


def tiny_spec(**changes: Any) -> RunSpec:
    """Eight short requests; `changes` are keywords of `resolve`."""
    usual = {"requests": 8, "max_new_tokens": 40, "max_model_len": 512, "batches": 3,
             "attention": OUR_ATTENTION}  # fmt: skip
    return resolve(load_scenario("short"), **{**usual, **changes})


def prompts_of(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Pseudo-random byte tokens with repeats in them, so that prompt lookup finds drafts."""
    phrase = [(seed * 37 + 11 * i) % 200 + 32 for i in range(12)]
    return [[(r + 40) % 256, *(phrase * (n // 12 + 1))[: n - 1]] for r, n in enumerate(lengths)]


def smollm2_on_short(name: str, count: int) -> tuple[ResolvedPair, list[list[int]]]:
    """Pair `name` and `count` prompts of scenario short; skips if it cannot be fetched."""
    try:
        pair = resolve_pair(name)
    except BenchError as error:
        pytest.skip(f"{name} cannot be fetched here: {error}")
    texts = load_prompts(load_scenario("short"))[:count]
    return pair, encode(texts, load_tokenizer(pair.target), 512, 32)


def run_cell(
    engine: VllmEngine,
    nwor: str,
    scv: str,
    prompts: list[list[int]],
    max_new_tokens: int = 40,
    temperature: float = 0.0,
) -> BatchOutput:
    """One batch of one cell."""
    engine.set_modes(Cell("tiny", NworMode(nwor), ScvMode(scv)))
    return engine.generate(prompts, Sampling(max_new_tokens, temperature, 1.0, 7, True))


TURN_MODES = [
    ("off", "off"), ("off", "adaptive"), ("stage", "off"), ("stage", "graph"), ("control", "off"),
    ("stage", "adaptive"),
]  # fmt: skip
AA_CELL = Cell("tiny", NworMode.OFF, ScvMode.OFF, AA)
INTERLEAVED_CELLS = (
    *(Cell("tiny", NworMode(nwor), ScvMode(scv)) for nwor, scv in TURN_MODES), AA_CELL,
)  # fmt: skip
"""Cells that are interleaved in tests of interleaved batches."""


def run_interleaved(
    engine: VllmEngine,
    prompts: list[list[int]],
    max_new_tokens: int = 40,
    seed: str = "a",
    cells: tuple[Cell, ...] = INTERLEAVED_CELLS,
    untimed: bool = False,
) -> tuple[BatchOutput, dict[Cell, list[WindowRecord]], dict[Cell, dict[str, Any]]]:
    """One batch in which cells are interleaved; its windows and SCV counters by cell."""
    engine.interleave(WindowOrder(cells, compared_pairs(cells), seed, untimed))
    try:
        output = engine.generate(prompts, Sampling(max_new_tokens, 0.0, 1.0, 7, True))
    finally:
        facts = engine.stop_interleaving()
    windows: dict[Cell, list[WindowRecord]] = {cell: [] for cell in cells}
    for window in output.windows:
        windows[cells[window.cell_number or 0]].append(window)
    return output, windows, dict(zip(cells, facts, strict=True))


def check_every_draft_staged(output: BatchOutput) -> None:
    """No window was written directly, and there were drafts."""
    reasons = {window.fallback_reason for window in output.windows}
    staged, drafts = total(output, "staged_tokens"), total(output, "draft_tokens")
    assert reasons == {None}, reasons
    assert staged == drafts > 0, (staged, drafts)


def total(output: BatchOutput, name: str) -> int:
    """Sum of one count over a batch's windows."""
    return total_of(output.windows, name)


def total_of(windows: Sequence[WindowRecord], name: str) -> int:
    """Sum of one count over windows."""
    return sum(getattr(window, name) for window in windows)


def worker_of(engine: VllmEngine) -> Any:
    """The engine's worker, in this process."""
    core = engine._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def close(engine: VllmEngine) -> None:
    """Close an engine and give its GPU memory back: a GPU's process holds one at a time."""
    engine.close()
    gc.collect()
    torch.cuda.empty_cache()


def implementations_of(engine: VllmEngine) -> set[str]:
    """Class names of the attention implementations of the engine's layers, in this process."""
    layers = worker_of(engine).model_runner.compilation_config.static_forward_context.values()
    return {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}


def abort_requests(engine: VllmEngine) -> None:
    """Drop the requests that a failed batch left in vLLM, as a server does."""
    llm_engine = engine._llm.llm_engine
    llm_engine.abort_request(list(llm_engine.output_processor.request_states), internal=True)
    worker_of(engine).model_runner.execute_model_state = None


def eagle_pair(folder: Path, layers: int = 3) -> ResolvedPair:
    """The tiny target with an EAGLE head made of its first layer: vLLM names it by `layers`."""
    target = Path(tiny_pair(folder, "ngram", layers=layers).target)
    weights = load_file(target / "model.safetensors")
    hidden = weights["model.embed_tokens.weight"].shape[1]
    head = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    head["fc.weight"] = np.hstack([np.eye(hidden), np.zeros((hidden, hidden))]).astype(np.float32)
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    eagle = folder / "eagle"
    eagle.mkdir()
    (eagle / "config.json").write_text(json.dumps(config))
    save_file(head, eagle / "model.safetensors", metadata={"format": "pt"})
    return ResolvedPair("tiny", "eagle", str(target), str(eagle), "float32")
