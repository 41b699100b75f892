"""The mark `own_process`."""

import os
from pathlib import Path

import pytest
from own_process import INSIDE, run_apart


@pytest.mark.slow
@pytest.mark.own_process
def test_a_marked_test_runs_elsewhere() -> None:
    assert INSIDE in os.environ


@pytest.mark.slow
def test_what_fails_elsewhere_fails_here(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    (tmp_path / "test_red.py").write_text("def test_red():\n    assert 1 == 2\n")
    request.node.add_marker("own_process")
    request.node._nodeid = str(tmp_path / "test_red.py")
    with pytest.raises(pytest.fail.Exception, match="1 == 2"):
        run_apart(request.node)
