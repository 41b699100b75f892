"""The checklist's rows that need an engine of their own, on either runner: scheduling, drafters,
drafts by batch size, LoRA.

What vLLM's CPU build cannot run is in test_gpu_methods.py, or refused by name: ngram_gpu pins
memory, suffix decoding needs a package that is not installed, DSpark and block verification are
the V2 runner's. Float32 unless a row forbids it; synthetic acceptance draws alike in every mode.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from checklist_rows import (
    LONG,
    ONE_LONG,
    PROMPTS,
    SCHEDULE,
    SMALL_CACHE,
    check_adapter,
    check_drafter,
    check_preemption,
    check_schedule,
)
from checklist_tools import ask, check_cache, check_partial, check_support, compare, greedy
from engine_tools import (
    FULL_FOR_ALL,
    SCV,
    eagle_pair,
    run_cell,
    smollm2_on_short,
    tiny_pair,
    tiny_spec,
    total,
    worker_of,
)
from tiny_drafters import eagle3_pair, mtp_pair, speculators_pair, write_lora

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.workload.run_spec import RunSpec

pytestmark = pytest.mark.engine

Start = Callable[..., VllmEngine]


def case(device: str, *values: Any, row: str = "", long: bool = True, name: str = "") -> Any:
    """A case of one device; on the CPU most are for `make test-all` alone."""
    marks = [pytest.mark.gpu] if device == "gpu" else [pytest.mark.long] * long
    marks += [pytest.mark.row(row)] * bool(row)
    return pytest.param(device, *values, marks=marks, id="-".join(filter(None, (device, name))))


def spec_of(device: str, arguments: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """Eight requests; on a GPU four drafts each, in full graphs."""
    own = {"draft_tokens": 4} if device == "gpu" else {}
    given = {**(FULL_FOR_ALL if device == "gpu" else {}), **(arguments or {})}
    return tiny_spec(**{**own, "block_size": 32, **changes}, engine_args=json.dumps(given))


def scv_of(device: str) -> Sequence[str]:
    return SCV if device == "gpu" else ("off", "graph")


@pytest.mark.parametrize(
    ("device", "build"),
    [
        case("cpu", eagle_pair, row="eagle", long=False, name="eagle"),
        case("cpu", eagle3_pair, row="eagle3", name="eagle3"),
        case("cpu", speculators_pair, row="eagle3", name="speculators"),
        case("cpu", mtp_pair, row="mtp", name="mtp"),
        case("gpu", eagle_pair, row="eagle", name="eagle"),
        case("gpu", eagle3_pair, row="eagle3", name="eagle3"),
        case("gpu", mtp_pair, row="mtp", name="mtp"),
    ],
)
def test_a_drafter_in_the_targets_cache_group(
    device: str, build: Callable[[Path], ResolvedPair], tmp_path: Path, start_alone: Start
) -> None:
    """The drafter's layer registers as one more of the target, and must not be staged."""
    pair, spec = build(tmp_path), spec_of(device)
    engine = start_alone(pair, spec)
    assert engine.status().staging_buffers == 3
    if device == "cpu":
        check_support(Path(pair.target), engine.status(), spec, pair.method)
    check_drafter(engine, scv_of(device))


@pytest.mark.long
@pytest.mark.row("eagle")
def test_the_shipped_head_drafts_held_out_prompts(start_alone: Start) -> None:
    """Real weights in float32, so that tokens can be compared."""
    pair, prompts = smollm2_on_short("smollm2", 6)
    spec = tiny_spec(requests=6, draft_tokens=4, dtype="float32", max_new_tokens=32)
    engine = start_alone(pair, spec)
    stock = run_cell(engine, "off", "off", prompts, max_new_tokens=32)
    staged = run_cell(engine, "stage", "graph", prompts, max_new_tokens=32)
    assert staged.token_ids == stock.token_ids
    assert staged.counters == stock.counters
    assert total(staged, "staged_tokens") == total(staged, "draft_tokens") > 0
    # As much as we want of it; prompt lookup gains 1.5 there, an untrained head 1.0.
    assert 1 + stock.counters.accepted_tokens / stock.counters.num_drafts >= 2.0


@pytest.mark.row("preemption under a small cache")
@pytest.mark.row("async scheduling")
@pytest.mark.parametrize(
    ("device", "late"),
    [
        case("cpu", True, name="async"),
        case("gpu", True, name="async"),
        case("gpu", False, name="in step"),
    ],
)
def test_preemption_with_results_that_come_late_or_not(
    device: str,
    late: bool,
    tmp_path: Path,
    start_alone: Start,
    record_property: Callable[[str, str], None],
) -> None:
    """Async scheduling also runs windows of requests that a token has already ended. vLLM switches
    it off on a CPU; test_async_scheduling.py has it nevertheless."""
    arguments = {**SMALL_CACHE, "async_scheduling": late}
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec_of(device, arguments))
    asynchronous = worker_of(engine).vllm_config.scheduler_config.async_scheduling
    assert asynchronous is (late and device == "gpu")
    for scv in scv_of(device):
        check_preemption(engine, scv)
    record_property("note", "vLLM computes again and swaps nothing out")
    if device == "cpu":
        record_property("note", "vLLM switches async scheduling off on a CPU")
        return
    free = ask(engine, "off", LONG[:4], greedy())
    params = [greedy(stop_token_ids=[tokens[20]]) for tokens in free.tokens]
    stock, staged = compare(engine, LONG[:4], params, SCV)
    for answers in (stock, staged):
        assert (answers.total("uncounted_draft_tokens") > 0) is late


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "accepted"),
    [
        pytest.param(1.0, 0, marks=pytest.mark.row("no acceptance"), id="none"),
        pytest.param(5.0, 1, marks=pytest.mark.row("full acceptance"), id="all"),
    ],
)
def test_every_draft_ends_alike(
    length: float, accepted: int, tmp_path: Path, start_alone: Start
) -> None:
    """`length`: tokens that a request gains a window; a request's last window may be cut."""
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    spec = spec_of("gpu", speculative_config=json.dumps(synthetic))
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    for number in (1, 8):
        stock, staged = compare(engine, PROMPTS[:number], greedy(), SCV)
        for answers in (stock, staged):
            assert answers.counters.accepted_tokens == accepted * answers.counters.draft_tokens
        assert staged.total("rejected_tokens") == (1 - accepted) * staged.total("staged_tokens")


@pytest.mark.gpu
@pytest.mark.row("ngram")
def test_prompt_lookup(tmp_path: Path, start_alone: Start) -> None:
    engine = start_alone(tiny_pair(tmp_path, "ngram"), spec_of("gpu"))
    for prompts in (ONE_LONG[:1], ONE_LONG):
        stock, staged = compare(engine, prompts, greedy(), SCV)
        check_partial(stock)
        check_cache(engine, prompts, staged)


SIZES = [3, 5, 6, 10, 12, 15, 20, 24]
GRAPHS_OF_BOTH = {
    "compilation_config": {**FULL_FOR_ALL["compilation_config"], "cudagraph_capture_sizes": SIZES}
}


@pytest.mark.parametrize("device", [case("cpu"), case("gpu")])
def test_drafts_whose_number_follows_the_batch(
    device: str, tmp_path: Path, start_alone: Start
) -> None:
    """On a GPU full graphs of windows of three and of five rows are captured in both sets."""
    arguments = GRAPHS_OF_BOTH if device == "gpu" else {}
    spec = spec_of(device, arguments, draft_tokens=4, speculative_config=json.dumps(SCHEDULE))
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    staged = check_schedule(engine, scv_of(device))
    if device == "cpu":
        check_cache(engine, ONE_LONG, staged)
        return
    facts = engine._rpc("nwor_status")["cuda_graphs"]
    assert facts["stage_window_sizes"] == facts["stock_window_sizes"]
    assert any(size % 5 == 0 for size in facts["stage_window_sizes"])
    assert any(size % 3 == 0 and size % 5 for size in facts["stage_window_sizes"])


@pytest.mark.long
@pytest.mark.row("LoRA")
def test_an_adapter(tmp_path: Path, start_alone: Start) -> None:
    """In a batch with both, stock vLLM 0.32 gives every request the adapter on a CPU."""
    pair = tiny_pair(tmp_path / "pair", "ngram")
    own = str(write_lora(tmp_path / "own", Path(pair.target)))
    engine = start_alone(pair, spec_of("cpu", lora=own))
    del engine._llm.generate  # which gives every request the adapter
    check_adapter(engine, pair.target, tmp_path / "lora", ["off", "graph"], fallback=None)


def test_every_request_of_a_run_uses_its_adapter(tmp_path: Path, start_alone: Start) -> None:
    pair = tiny_pair(tmp_path / "pair", "ngram")
    adapter = str(write_lora(tmp_path / "lora", Path(pair.target)))
    engine = start_alone(pair, spec_of("cpu", lora=adapter))
    own = engine.decode_greedily([[5, 6, 7], [8, 9]], [8, 8], ignore_eos=True)
    del engine._llm.generate
    plain = engine.decode_greedily([[5, 6, 7], [8, 9]], [8, 8], ignore_eos=True)
    assert all(a.token_ids != b.token_ids for a, b in zip(own, plain, strict=True))
