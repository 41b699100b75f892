"""The Triton kernels' tests in Triton's interpreter, in a process of their own: the variable that
turns it on is read when a kernel is defined, and would reach every engine started from here."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
KERNELS = (
    ("verify_attention", "discard", "mask", "mla", "mla_tail", "window_merge"),
    ("commit", "commit_fp8", "commit_refusals", "commit_update", "gated_delta",
     "gated_delta_rings", "stage", "staged_windows"),
)  # fmt: skip
"""Halves that take about as long, each a process beside the other."""


def run_python(*arguments: str, **more_env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout with both source roots on its path."""
    roots = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "kernels")])
    env = {**os.environ, "PYTHONPATH": roots, **more_env}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False
    )


def interpret(kernels: tuple[str, ...], wanted: str, profile: str) -> None:
    """The tests of some kernels with the interpreter turned on pass, and there are some."""
    tests = [str(HERE / f"test_{kernel}.py") for kernel in kernels]
    options = ("-q", "-p", "no:cacheprovider", "-m", f"triton and not gpu and {wanted}")
    plugins = ("-p", "_hypothesis_pytestplugin", f"--hypothesis-profile={profile}")
    quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "pytest", *tests, *options, *plugins, TRITON_INTERPRET="1", **quick)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "profile"),
    [
        ("not long", "test"),
        pytest.param("(long or hypothesis)", "test-all", marks=pytest.mark.long),
    ],
    ids=["some", "rest"],
)
def test_kernels_in_the_interpreter(wanted: str, profile: str) -> None:
    """In `make test` some of each kernel's tests; the rest, and all examples, in test-all."""
    pytest.importorskip("triton")
    with ThreadPoolExecutor() as pool:
        halves = [pool.submit(interpret, kernels, wanted, profile) for kernels in KERNELS]
        for half in halves:
            half.result()


def test_the_interpreter_is_not_on_here() -> None:
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.slow  # a process
def test_the_references_run_on_a_cpu_without_triton() -> None:
    done = run_python(
        "-c",
        """import sys; sys.modules['triton'] = None
import torch
from nwor_kernels.commit import reference
from nwor_kernels.gated_delta import reference
from nwor_kernels.mask import reference
from nwor_kernels.mla_verify_attention import reference
from nwor_kernels.verify_attention import reference
from nwor_kernels.window_merge import reference
from nwor_kernels.stage.reference import stage_kv_cache_reference
row, metadata = torch.full((1, 1, 2), torch.nan), torch.zeros(2, dtype=torch.int32)
one = torch.ones(1, 1, 2)
stage_kv_cache_reference(one, one, torch.tensor([0]), row, row.clone(), metadata)
assert row.equal(one)""",
    )
    assert done.returncode == 0, done.stderr
