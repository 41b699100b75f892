"""Tests that need a process of their own, marked `own_process`: each runs in a pytest of its own.

vLLM reads some switches as its modules are imported, and PyTorch cannot start a second engine in a
process whose first one captured breakable CUDA graphs.
"""

import os
import subprocess
import sys

import pytest

INSIDE = "NWOR_TEST_OWN_PROCESS"
"""Set in that process, which runs the test itself."""


def run_apart(item: pytest.Function) -> bool:
    """True if the test was run elsewhere; fails with that process's output if it failed there."""
    if item.get_closest_marker("own_process") is None or INSIDE in os.environ:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", item.nodeid]
    done = subprocess.run(
        command,
        cwd=item.config.rootpath,
        env={**os.environ, INSIDE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        pytest.fail(f"exit {done.returncode} of {' '.join(command)}:\n{done.stdout}", pytrace=False)
    return True
