"""NVTX ranges of the harness: when they are on, what they hold, and nothing while they are off."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from nvtx_recorder import NvtxModule, NvtxThatMustNotBeCalled
from refusals import refused
from toy_run import Runner

from nwor_bench.errors import ExitCode
from nwor_bench.instruments import nvtx_ranges
from nwor_bench.instruments.nvtx_ranges import (
    DOMAIN,
    NVTX_VARIABLE,
    PROFILERS,
    ranges_if_wanted,
    wanted,
)

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NVTX_VARIABLE, "NVTX_DISABLE", *PROFILERS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> NvtxModule:
    module = NvtxModule()
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return module


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({NVTX_VARIABLE: ""}, False),
        ({NVTX_VARIABLE: "1"}, True),
        ({"NVTX_INJECTION64_PATH": "/opt/tool.so"}, True),
        ({"NSYS_PROFILING_SESSION_ID": "77"}, True),
        ({NVTX_VARIABLE: "0", "NVTX_INJECTION64_PATH": "/opt/tool.so"}, False),
    ],
)
def test_when_ranges_are_on(environ: dict[str, str], on: bool) -> None:
    assert wanted(environ) is on


def test_ranges_that_nobody_would_hear_are_refused(
    monkeypatch: pytest.MonkeyPatch, nvtx: NvtxModule
) -> None:
    """Never a profile without ranges and without a word."""
    with refused(NVTX_VARIABLE, value="yes") as refusal:
        wanted({NVTX_VARIABLE: "yes"})
    assert refusal.value.exit_code is ExitCode.BAD_USAGE
    with refused("NVTX_DISABLE", value="1"):
        ranges_if_wanted({NVTX_VARIABLE: "1", "NVTX_DISABLE": "1"})
    nvtx.Domain = type("Domain", (), {})
    monkeypatch.setitem(sys.modules, "nvtx._lib.lib", None)
    assert nvtx_ranges.open_ranges({})
    with refused("NVTX", cause=ImportError, naming="pip install nvtx==") as refusal:
        nvtx_ranges.open_ranges({"NSYS_PROFILING_SESSION_ID": "7"})
    assert refusal.value.exit_code is ExitCode.BAD_USAGE
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with refused(NVTX_VARIABLE, cause=ImportError, naming="pip install nvtx"):
        ranges_if_wanted({NVTX_VARIABLE: "1"})


def test_a_sweep_without_ranges_does_not_touch_nvtx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", NvtxThatMustNotBeCalled())
    runner = Runner(tmp_path / "run", FakeEngine(), batches=2)
    assert runner.run().batches
    with pytest.raises(AssertionError, match="while ranges are off"):
        nvtx_ranges.open_ranges()  # the stand-in does fail where nvtx is used


def test_a_sweeps_ranges_are_its_batches(
    monkeypatch: pytest.MonkeyPatch, nvtx: NvtxModule, tmp_path: Path
) -> None:
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    runner = Runner(tmp_path / "run", FakeEngine(), batches=2)
    run = runner.run()
    (domain,) = nvtx.domains.values()
    assert list(nvtx.domains) == [DOMAIN]
    (sweep,) = domain.take().inside
    assert (sweep.name, sweep.payload) == ("sweep", runner.plan.num_batches)
    blocks = [turn for turn in sweep.inside if turn.name == "block"]
    assert [block.payload for block in blocks] == [1, 2]
    assert {cell.name for block in blocks for cell in block.inside} == {"cell"}
    expected = [(b.batch, b.order, runner.log.done[b.batch][0]) for b in run.batches]
    turns = []
    for cell in sweep.all("cell"):
        (batch,) = cell.inside
        assert (batch.name, batch.category) == ("batch", cell.category)
        turns.append((batch.payload, cell.payload, cell.category))
    assert turns == expected
    assert {"off x off", "off x off (A/A)", "stage x graph"} <= {turn[2] for turn in turns}


def test_ranges_are_closed_when_a_batch_fails(
    monkeypatch: pytest.MonkeyPatch, nvtx: NvtxModule, tmp_path: Path
) -> None:
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    runner = Runner(tmp_path / "run", FakeEngine(failing={3: RuntimeError("gone")}))
    with pytest.raises(RuntimeError, match="gone"):
        runner.run()
    (domain,) = nvtx.domains.values()
    assert len(domain.take().all("batch")) == 4


LISTENER = Path(__file__).parents[1] / "data" / "nvtx_listener.c"
EMIT = """
from nwor_bench.instruments.nvtx_ranges import ranges_if_wanted, span
ranges = ranges_if_wanted()
with span(ranges, "batch", 7, "stage x graph"):
    with span(ranges, "window", 0, "stage x graph"):
        pass
with span(ranges, "sweep", 3):
    pass
"""


@pytest.mark.slow  # processes
@pytest.mark.parametrize("tool", [(), ("-DREFUSES_EXTENSIONS",)], ids=["new", "old"])
def test_a_real_profiler_hears_the_ranges(tool: tuple[str, ...], tmp_path: Path) -> None:
    """The package nvtx itself, with a tool that it loads as it would load Nsight Systems.

    An old tool refuses NVTX's extensions: nvtx then takes every domain for switched off.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, heard = tmp_path / "listener.so", tmp_path / "heard.txt"
    subprocess.run([compiler, "-shared", "-fPIC", *tool, "-o", library, LISTENER], check=True)
    environ = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "NVTX_INJECTION64_PATH": str(library),
        "NVTX_LISTENER_FILE": str(heard),
    }
    subprocess.run([sys.executable, "-c", EMIT], check=True, env=environ)
    lines = heard.read_text().splitlines()
    domains = [line for line in lines if line.startswith("domain")]
    assert set(domains) == {"domain nwor-bench"}
    assert lines[len(domains) :] == [
        "category 1 stage x graph",
        "push nwor-bench batch 1 7",
        "push nwor-bench window 1 0",
        "pop nwor-bench",
        "pop nwor-bench",
        "push nwor-bench sweep 0 3",
        "pop nwor-bench",
    ]
