"""What vLLM is told about processors, and which of its arguments are refused before a start."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from nwor_bench.engine import arguments, preflight
from nwor_bench.engine.arguments import (
    _check_step_tokens,
    set_environment,
    start_llm,
)
from nwor_bench.errors import EngineError
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.workload.config import load_scenario, resolve

BINDING = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.fixture(autouse=True)
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with the processors 2, 3, 6 and 7; the environment is put back."""
    monkeypatch.setattr("nwor_bench.engine.arguments.on_cpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 6, 3})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(BINDING, None)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, "auto"), (2, "2,3|6,7"), (3, "2|3|6"), (4, "2|3|6|7")]
)
def test_ranks_share_out_the_processors(ranks: int, expected: str) -> None:
    set_environment("float32", ranks)
    assert os.environ[BINDING] == expected


@pytest.mark.parametrize(("ranks", "given"), [(1, "3"), (2, "2|7"), (2, "nobind"), (1, "nobind")])
def test_what_the_user_says_stands(ranks: int, given: str) -> None:
    os.environ[BINDING] = given
    set_environment("float32", ranks)
    assert os.environ[BINDING] == given


def test_an_engine_of_fewer_ranks_is_not_bound_like_the_one_before() -> None:
    set_environment("float32", 2)
    set_environment("float32", 1)
    assert os.environ[BINDING] == "auto"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("qwen3-next-shape", None, False),
        ("qwen3-next-shape", '{"enable_prefix_caching": true}', True),
        ("llama-1b-shape", None, None),
    ],
)
def test_a_hybrids_prefixes_are_not_cached_unless_asked(
    name: str, given: str | None, expected: bool | None
) -> None:
    spec = resolve(load_scenario("short"), engine_args=given)
    found = arguments.engine_arguments(resolve_pair(name), spec)
    assert found.get("enable_prefix_caching") is expected


def test_what_vllm_writes_into_its_arguments_stays_out_of_the_run() -> None:
    """vLLM adds `gdn_prefill_backend` to additional_config: a cell is named by what was written."""
    spec = resolve(load_scenario("short"), engine_args='{"additional_config": {"a": 1}}')
    found = arguments.engine_arguments(resolve_pair("llama-1b-shape"), spec)
    found["additional_config"]["gdn_prefill_backend"] = "triton"
    assert spec.engine_args == {"additional_config": {"a": 1}}


def test_what_the_user_says_of_mkl_stands() -> None:
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    set_environment("float32", 1)
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"


PRODUCTS = """
import torch
rows, weight = torch.randn(5, 64), torch.randn(192, 64)
found = set()
for threads in (1, torch.get_num_threads()):
    torch.set_num_threads(threads)
    for offset in range(16):  # floats, of 64 bytes
        moved = torch.empty(rows.numel() + 16)[offset:][: rows.numel()].view(rows.shape)
        found.add(torch.nn.functional.linear(moved.copy_(rows), weight).numpy().tobytes())
print(len(found))
"""


@pytest.mark.slow
def test_products_have_the_same_bits_at_any_alignment_and_with_any_threads() -> None:
    os.environ.pop("MKL_CBWR", None)
    os.environ["OMP_NUM_THREADS"] = "2"
    set_environment("float32", 1)
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def config_of(step_tokens: int, requests: int, longest: int) -> Any:
    """The three numbers of a VllmConfig that decide how long vLLM's dummy requests are."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=step_tokens, max_num_seqs=requests),
        model_config=SimpleNamespace(max_model_len=longest),
    )


@pytest.mark.parametrize(("step_tokens", "requests", "longest"), [(16384, 8, 2048), (1, 1, 1)])
def test_steps_that_the_dummy_requests_can_hold_pass(
    step_tokens: int, requests: int, longest: int
) -> None:
    _check_step_tokens(config_of(step_tokens, requests, longest))


@pytest.mark.parametrize(("step_tokens", "requests", "longest"), [(65536, 8, 2048), (9, 2, 4)])
def test_a_step_larger_than_all_requests_is_refused(
    step_tokens: int, requests: int, longest: int
) -> None:
    """(65536, 8, 2048) ended in an illegal memory access at vLLM's start on an H200."""
    most = requests * longest
    with refused("--engine-args: max_num_batched_tokens", value=step_tokens, naming=f"{most}"):
        _check_step_tokens(config_of(step_tokens, requests, longest))


@pytest.mark.parametrize(
    ("pair", "length", "field"),
    [("tiny", 3.33, "--acceptance-length"), ("llama-3b-shape", None, "--pair")],
)
def test_synthetic_acceptance_is_refused_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, pair: str, length: float | None, field: str
) -> None:
    own, spec = resolve_pair(pair), resolve(load_scenario("short"), acceptance_length=length)
    with refused(field, value=pair if length is None else 3.33):
        preflight.check_pair(own, spec)
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: False)
    preflight.check_pair(own, spec)


def test_a_torchvision_that_does_not_fit_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `import vllm` ends in if torchvision was built for another PyTorch."""

    def start(**arguments: object) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start))
    monkeypatch.setattr(arguments, "engine_arguments", lambda pair, spec: {})
    remedy = "pip uninstall -y torchvision torchaudio torchcodec"
    with refused("vLLM did not start", EngineError, naming=remedy):
        start_llm(resolve_pair("tiny"), resolve(load_scenario("short")))
