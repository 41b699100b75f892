"""What vLLM's CPU workers are told about processors."""

import os

import pytest

from nwor_bench.engine_config import set_environment
from nwor_bench.errors import ConfigError

BINDING = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.fixture(autouse=True)
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with the processors 2, 3, 6 and 7; the environment is put back."""
    monkeypatch.setattr("nwor_bench.engine_config.on_cpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 6, 3})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(BINDING, None)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, "auto"), (2, "2,3|6,7"), (3, "2|3|6"), (4, "2|3|6|7")]
)
def test_ranks_share_out_the_processors(ranks: int, expected: str) -> None:
    set_environment("float32", ranks)
    assert os.environ[BINDING] == expected


def test_more_ranks_than_processors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: 5 .* there are 4 here"):
        set_environment("float32", 5)


@pytest.mark.parametrize(("ranks", "given"), [(1, "3"), (2, "2|7"), (2, "nobind"), (1, "nobind")])
def test_what_the_user_says_stands(ranks: int, given: str) -> None:
    os.environ[BINDING] = given
    set_environment("float32", ranks)
    assert os.environ[BINDING] == given


def test_an_engine_of_fewer_ranks_is_not_bound_like_the_one_before() -> None:
    set_environment("float32", 2)
    set_environment("float32", 1)
    assert os.environ[BINDING] == "auto"
