"""Which of vLLM's drafters draft as many tokens as the scheduler says."""

from types import SimpleNamespace
from typing import Any

import pytest

from nwor_bench.plugin.refusals import constant_drafter

pytestmark = pytest.mark.slow  # imports vLLM

V2 = "vllm.v1.worker.gpu.spec_decode"


@pytest.mark.parametrize(
    ("module", "name", "refused"),
    [
        ("eagle", "EagleSpeculator", False),
        ("mtp", "MTPSpeculator", False),
        ("standalone_ar", "StandaloneARSpeculator", True),  # method draft_model
        ("multi_module_mtp", "MultiModuleMTPSpeculator", True),
    ],
)
def test_only_drafters_of_one_batch_follow_the_scheduler(
    module: str, name: str, refused: bool
) -> None:
    kind: Any = getattr(pytest.importorskip(f"{V2}.{module}.speculator"), name)
    runner = SimpleNamespace(speculator=object.__new__(kind))
    assert constant_drafter(runner) == (name if refused else None)


def test_the_v1_runner_has_no_speculator() -> None:
    assert constant_drafter(SimpleNamespace(drafter=object())) is None
