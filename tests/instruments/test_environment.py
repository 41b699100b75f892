"""Facts of the machine: true where they can be checked, None where they cannot be known."""

import json
import platform
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from nwor_bench import __version__
from nwor_bench.instruments import device, environment
from nwor_bench.instruments.device import float32_reason, no_native_bf16
from nwor_bench.records.facts import Environment, GitState, GpuFacts, to_json


def test_the_machine_and_named_settings_are_plain_json(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    found = environment.collect()
    text = json.dumps(to_json(found), allow_nan=False)
    assert Environment.read(json.loads(text)) == found
    assert found.python == platform.python_version()
    assert found.packages["nwor-bench"] in (__version__, None)
    assert found.packages["numpy"] is not None
    assert found.command_line == tuple(sys.argv)
    assert found.memory.total_bytes > 2**20
    assert found.cpu.threads >= 1
    for name in ("model", "cores", "usable_threads"):
        assert getattr(found.cpu, name) not in (0, ""), name
    assert found.settings["VLLM_NWOR_MODE"] == "stage"
    host = socket.gethostname()
    assert "hush" not in text
    assert len(host) < 4 or host not in text


def test_without_gpus_the_list_is_empty_and_says_why(monkeypatch):
    import pynvml

    refusal = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=refusal))
    found = environment.collect()
    assert found.gpus == ()
    assert found.gpu_note.startswith("NVML: ")


def test_facts_that_a_gpu_does_not_know_are_none():
    nvml = MagicMock(NVMLError=RuntimeError)
    for name in ("MemoryInfo", "CudaComputeCapability", "EnforcedPowerLimit", "EccMode"):
        getattr(nvml, f"nvmlDeviceGet{name}").side_effect = RuntimeError(name)
    nvml.nvmlDeviceGetName.return_value = "Toy GPU"
    nvml.nvmlSystemGetDriverVersion.return_value = "999.1"
    assert environment._gpu(nvml, None) == GpuFacts(name="Toy GPU", driver="999.1")
    nvml.nvmlDeviceGetEccMode = Mock(return_value=[1, 1])
    nvml.nvmlDeviceGetCudaComputeCapability = Mock(return_value=(9, 0))
    nvml.nvmlDeviceGetEnforcedPowerLimit = Mock(return_value=700_000)
    found = environment._gpu(nvml, None)
    assert (found.ecc, found.compute_capability, found.power_limit_w) == (True, "9.0", 700)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_revision_is_that_of_the_checkout_that_tracks_the_file(tmp_path):
    source = tmp_path / "package" / "module.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    unknown = GitState()
    assert environment._git(source) == unknown
    git(tmp_path, "init", "-q")
    assert environment._git(source) == unknown
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert environment._git(source) == GitState(revision=revision, dirty=False)
    source.write_text("x = 2\n")
    assert environment._git(source) == GitState(revision=revision, dirty=True)
    installed = tmp_path / "copy.py"
    installed.write_text("x = 1\n")
    assert environment._git(installed) == unknown


@pytest.mark.slow  # a process
def test_neither_torch_nor_vllm_is_imported():
    code = (
        "import sys, nwor_bench.instruments.environment as e; e.collect(); "
        "sys.exit(int('torch' in sys.modules or 'vllm' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


AMX = "flags\t\t: avx2 avx512f amx_bf16 amx_tile\n"
ARM = "Features\t: fp asimd bf16 i8mm\n"
NAMED = "model name\t: avx512_bf16 in a name\nflags\t\t: fpu sse2 avx avx2 fma\n"


@pytest.mark.parametrize(
    ("text", "isa", "reason"),
    [
        ("flags\t\t: avx2 avx512f avx512_bf16\n", None, None),
        *((AMX, isa, None) for isa in ("", "ALL", "AVX512_CORE_BF16", "AVX512_CORE_AMX")),
        (ARM, None, None),
        *((text, None, "this processor has no native bf16")
          for text in (NAMED, "flags\t\t: avx2 avx512f avx512_vnni\n", "")),
        *((AMX, isa, f"ONEDNN_MAX_CPU_ISA={isa} has no native bf16")
          for isa in ("AVX2", "avx2", "AVX512_CORE", "AVX512_CORE_VNNI")),
    ],
)  # fmt: skip
def test_a_processor_or_an_isa_of_onednn_without_bf16(text, isa, reason):
    found = no_native_bf16(text, {} if isa is None else {"ONEDNN_MAX_CPU_ISA": isa})
    assert found == reason or found.startswith(reason)


@pytest.mark.parametrize(
    ("dtype", "gpu", "isa", "changes"),
    [
        ("bfloat16", False, "AVX2", True),
        ("auto", False, "AVX2", True),
        ("float32", False, "AVX2", False),
        ("bfloat16", True, "AVX2", False),
        ("bfloat16", False, "ALL", False),
    ],
)
def test_dtype_follows_the_processor(monkeypatch, tmp_path, dtype, gpu, isa, changes):
    info = tmp_path / "cpuinfo"
    info.write_text(AMX)
    monkeypatch.setattr(device, "CPU_INFO", info)
    monkeypatch.setattr(device, "uses_gpu", lambda: gpu)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert (float32_reason(dtype) is not None) == changes
