"""What a run ran on: true where it can be checked, silent where it cannot be known."""

import json
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nwor_bench import __version__
from nwor_bench.instruments import environment
from nwor_bench.records.facts import Environment, GitState, GpuFacts, to_json


@pytest.fixture(scope="module")
def found() -> Environment:
    return environment.collect()


def test_it_is_plain_json(found):
    plain = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert Environment.read(plain) == found


def test_it_names_this_interpreter_and_package(found):
    assert found.python == platform.python_version()
    assert found.packages["nwor-bench"] in (__version__, None)
    assert found.packages["numpy"] is not None
    assert found.command_line == tuple(sys.argv)


def test_it_does_not_name_the_host(found):
    host = socket.gethostname()
    assert len(host) < 4 or host not in json.dumps(to_json(found))


def test_machine_facts_are_positive_or_absent(found):
    assert found.memory.total_bytes > 2**20
    assert found.cpu.threads >= 1
    for name in ("model", "cores", "usable_threads"):
        assert getattr(found.cpu, name) not in (0, ""), name


def test_without_gpus_the_list_is_empty_and_says_why(monkeypatch):
    import pynvml

    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    found = environment.collect()
    assert found.gpus == ()
    assert found.gpu_note.startswith("NVML: ")


def test_what_a_gpu_does_not_tell_is_none():
    class Nvml:
        """A GPU that knows its name and nothing else."""

        NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = 0
        NVMLError = RuntimeError

        def __getattr__(self, name):
            def refuse(*_):
                raise RuntimeError(name)

            return refuse

        def nvmlDeviceGetName(self, _):  # noqa: N802 - NVML's name
            return "Toy GPU"

        def nvmlSystemGetDriverVersion(self):  # noqa: N802 - NVML's name
            return "999.1"

    gpu = environment._gpu(Nvml(), None)
    assert gpu == GpuFacts(name="Toy GPU", driver="999.1")


def test_only_named_settings_are_copied(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    found = environment.collect()
    assert found.settings["VLLM_NWOR_MODE"] == "stage"
    assert "hush" not in json.dumps(to_json(found))


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
