"""Refusals that need no vLLM in memory: names, ranks, and what only a GPU can do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from nwor_bench.engine import arguments, preflight
from nwor_bench.engine.preflight import check_flags, check_pair, why_engines
from nwor_bench.models.methods import NOT_ON_CPU
from nwor_bench.models.pairs import ResolvedPair, resolve_pair
from nwor_bench.workload.config import RunSpec, load_scenario, resolve
from nwor_bench.workload.sweep_file import SweepFile


def spec_of(**given: Any) -> RunSpec:
    return resolve(load_scenario("short"), **given)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "uses_gpu", lambda: True)
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: False)
    monkeypatch.setattr(preflight, "visible_gpu_uuids", lambda: ["GPU-0", "GPU-1"])


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "uses_gpu", lambda: False)
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


@pytest.mark.parametrize(
    ("flag", "name", "near"),
    [
        ("engine_args", "enforce_eger", "enforce_eager"),
        ("speculative_config", "num_speculative_token", "num_speculative_tokens"),
    ],
)
def test_a_name_that_vllm_does_not_know_is_refused(flag: str, name: str, near: str) -> None:
    with refused(f"--{flag.replace('_', '-')}", value=name, near=near):
        check_flags(spec_of(**{flag: json.dumps({name: 1})}))


def test_names_that_vllm_knows_pass() -> None:
    check_flags(spec_of(engine_args='{"enforce_eager": true, "use_replayssm": true}'))
    check_flags(spec_of(speculative_config='{"prompt_lookup_max": 3}'))


def test_without_vllms_source_names_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "vllm_source", lambda: None)
    check_flags(spec_of(engine_args='{"enforce_eger": true}'))


@pytest.mark.parametrize("value", [0, 5, 19])
def test_too_few_log_probabilities_are_refused(value: int) -> None:
    with refused("--engine-args: max_logprobs", value=value):
        check_flags(spec_of(engine_args={"max_logprobs": value}))
    check_flags(spec_of(engine_args={"max_logprobs": 20}))


@pytest.mark.usefixtures("on_gpu")
def test_more_ranks_than_gpus_are_refused_unless_ray_has_more() -> None:
    check_flags(spec_of(tensor_parallel_size=2))
    with refused("--tensor-parallel-size", value=8, naming="2 here"):
        check_flags(spec_of(tensor_parallel_size=8))
    ray = '{"distributed_executor_backend": "ray"}'
    check_flags(spec_of(tensor_parallel_size=8, engine_args=ray))


@pytest.mark.usefixtures("on_cpu")
def test_more_ranks_than_processors_are_refused() -> None:
    with refused("--tensor-parallel-size", value=3, naming="2 here"):
        check_flags(spec_of(tensor_parallel_size=3))


@pytest.mark.usefixtures("on_cpu")
def test_cells_that_a_cpu_can_run_pass() -> None:
    check_flags(spec_of(cells="stage-off,stage-graph"))


@pytest.mark.usefixtures("on_gpu")
def test_a_gpu_has_all_of_it() -> None:
    check_flags(spec_of(cells="stage-graph", counters="dram", batches=3, stage_by="copy"))
    for method in NOT_ON_CPU:
        check_pair(ResolvedPair("own", method, "org/model", None, "auto"), spec_of())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("method", sorted(NOT_ON_CPU))
def test_methods_that_a_cpu_cannot_run_are_refused(method: str) -> None:
    with refused("--method", value=method):
        check_pair(ResolvedPair("own", method, "org/model", None, "auto"), spec_of())


def test_what_the_targets_config_rules_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(entries: dict[str, Any], **given: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6} | entries))
        check_pair(ResolvedPair("own", "ngram", str(tmp_path), None, "auto"), spec_of(**given))

    with refused("--tensor-parallel-size", value=4, naming="6 attention heads"):
        check({}, tensor_parallel_size=4)
    check({}, tensor_parallel_size=3)
    short = {"max_position_embeddings": 512}
    with refused("--max-model-len", value=513, naming="is 512"):
        check(short, max_model_len=513)
    check(short, max_model_len=512)
    for theirs in ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, {"model_max_length": 9}):
        check(short | theirs, max_model_len=513)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check(short, max_model_len=513)


@pytest.mark.slow
def test_it_imports_neither_vllm_nor_torch_nor_transformers() -> None:
    code = (
        "import sys; from nwor_bench.engine.preflight import check_flags; "
        "from nwor_bench.workload.config import load_scenario, resolve; "
        "check_flags(resolve(load_scenario('short'), engine_args='{\"enforce_eager\": true}')); "
        "print(sorted({'vllm', 'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_draft_counts_run_with_the_graphs_that_are_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another mode is given, and only on a GPU; vLLM's default is refused by name."""
    pair = resolve_pair("tiny-mtp")
    graphs = {"mode": 0}

    def mode(on_cpu: bool, **given: Any) -> Any:
        monkeypatch.setattr(arguments, "on_cpu", lambda: on_cpu)
        spec = spec_of(
            draft_counts=[0, 1, 2], nwor_modes="off", scv_modes="off",
            engine_args={"compilation_config": {**graphs, **given}},
        )  # fmt: skip
        return arguments.engine_arguments(pair, spec)["compilation_config"]

    assert mode(False) == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert mode(False, cudagraph_mode="PIECEWISE") == {"mode": 0, "cudagraph_mode": "PIECEWISE"}
    assert mode(True) == graphs


def counts_of(**given: Any) -> RunSpec:
    flags = {"draft_counts": [0, 1, 2], "engines": True, "nwor_modes": "off", "scv_modes": "off"}
    return spec_of(**flags, **given)


@pytest.mark.usefixtures("on_gpu")
def test_adaptive_verification_goes_by_a_drafters_logits() -> None:
    spec = counts_of(adaptive_verification=True)
    with refused("--adaptive-verification", value=True, naming="suffix"):
        check_pair(ResolvedPair("own", "suffix", "t", None, "auto"), spec)
    for method in ("eagle", "mtp", "dflash", "dspark", "draft_model"):
        check_pair(ResolvedPair("own", method, "t", "d", "auto"), spec)


@pytest.mark.parametrize(
    ("method", "layers", "most", "gpu", "why"),
    [
        ("ngram", 0, 2, False, "ngram"),
        ("suffix", 0, 2, True, "suffix"),
        ("draft_model", 0, 2, True, "same number at every k"),
        ("draft_model", 0, 2, False, None),
        ("mtp", 2, 2, True, "several modules"),
        ("mtp", 2, 1, True, None),  # one module drafts once
        ("mtp", 1, 2, True, None),
        ("mtp", 2, 2, False, None),
        ("eagle", 0, 2, True, None),
    ],
)
def test_which_methods_need_an_engine_for_each_count(
    method: str,
    layers: int,
    most: int,
    gpu: bool,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "uses_gpu", lambda: gpu)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": layers}))
    pair = ResolvedPair("own", method, str(tmp_path), None, "auto")
    monkeypatch.setattr(preflight, "resolve_pair", lambda *_, **__: pair)
    axes = {"draft_tokens": [most], "nwor_modes": ["off"], "scv_modes": ["off"]}
    settings = {"target_model": str(tmp_path), "draft_counts": [*range(most + 1)]}
    content = json.dumps({"name": "s", "axes": axes, "settings": settings})
    found = why_engines(SweepFile.model_validate_json(content))
    assert (found is None) == (why is None)
    assert why is None or why in (found or "")
