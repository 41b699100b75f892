"""Our real commit kernel in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a process that interprets for a quarter of a minute

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    pytest.importorskip("triton")
    roots = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "kernels")])
    env = {**os.environ, "PYTHONPATH": roots, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "kernels_in_the_interpreter.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_right_result_passes_and_an_absent_one_does_not(found) -> None:
    right, idle = found["nwor"]
    assert right == ""
    assert idle != ""


def test_the_peers_that_are_not_here_are_listed(found) -> None:
    assert "vllm_cuda" in found["refused"]
