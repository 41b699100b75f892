"""The plugin's switches, and that without them it imports nothing of vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

from nwor_bench.errors import ExitCode
from nwor_bench.plugin.settings import PluginSettings, read_settings
from nwor_bench.records.types import NworMode, ScvMode, StageBy

ROOT = Path(__file__).parents[2]

HEAVY = "assert not {'vllm', 'torch'} & set(sys.modules), 'something heavy was imported'\n"

REGISTER_AND_SAY = """\
import sys
import nwor_bench.instruments.versions
{prepare}
from nwor_bench.errors import BenchError
from nwor_bench.plugin import register
try:
    register()
except BenchError as error:
    print(error)
"""


def run_python(code: str, **environ: str) -> str:
    """Standard output of a fresh interpreter that knows none of our variables but these."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_NWOR", "VLLM_SCV"))}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=own | environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environ_of(words: str) -> dict[str, str]:
    """Variables of "NWOR_MODE=stage SCV_MODE=": all of vLLM's names begin so."""
    return {f"VLLM_{name}": value for name, _, value in (w.partition("=") for w in words.split())}


NWOR, SCV = NworMode, ScvMode


@pytest.mark.parametrize(
    ("environ", "nwor", "scv", "more"),
    [
        ("NWOR_MODE=stage", NWOR.STAGE, SCV.OFF, {}),
        ("NWOR_MODE=off", NWOR.OFF, SCV.OFF, {}),
        ("SCV_MODE=graph", NWOR.OFF, SCV.GRAPH, {}),
        ("NWOR_MODE= SCV_MODE=adaptive", NWOR.OFF, SCV.ADAPTIVE, {}),
        ("NWOR_MODE=interleave", NWOR.STAGE, SCV.ADAPTIVE, {"interleave": True}),
        ("NWOR_MODE=interleave SCV_MODE=", NWOR.STAGE, SCV.ADAPTIVE, {"interleave": True}),
        ("NWOR_MODE=interleave SCV_MODE=off", NWOR.STAGE, SCV.OFF, {"interleave": True}),
        ("NWOR_DRAFTS=interleave", NWOR.OFF, SCV.OFF, {"drafts": True}),
        ("NWOR_DRAFTS=interleave NWOR_MODE=off", NWOR.OFF, SCV.OFF, {"drafts": True}),
        ("NWOR_MODE=stage NWOR_DEBUG=yes", NWOR.STAGE, SCV.OFF, {"debug": True}),
        ("NWOR_MODE=stage NWOR_DEBUG=0", NWOR.STAGE, SCV.OFF, {}),
        ("NWOR_MODE=stage NWOR_DEBUG=", NWOR.STAGE, SCV.OFF, {}),
        ("NWOR_MODE=stage NWOR_STAGE_BY=", NWOR.STAGE, SCV.OFF, {}),
        ("NWOR_MODE=off NWOR_STAGE_BY=copy", NWOR.OFF, SCV.OFF, {"stage_by": StageBy.COPY}),
    ],
)
def test_what_the_variables_say(
    environ: str, nwor: NworMode, scv: ScvMode, more: dict[str, object]
) -> None:
    settings = read_settings(environ_of(environ))
    assert settings == PluginSettings(nwor, scv, **{"debug": False, **more})
    assert settings.mode_name == ("interleave" if "interleave" in more else nwor)
    assert settings.needs_gpu == ("VLLM_NWOR_STAGE_BY" if "copy" in environ else None)


@pytest.mark.parametrize(
    "environ", ["", "NWOR_MODE= SCV_MODE= NWOR_DRAFTS=", "NWOR_DEBUG=1", "NWOR_STAGE_BY=copy"]
)
def test_without_a_mode_there_are_no_settings(environ: str) -> None:
    assert read_settings({"NWOR_MODE": "stage", **environ_of(environ)}) is None


DRAFTS = {"VLLM_NWOR_DRAFTS": "interleave"}
KNOWN = {
    "VLLM_NWOR_MODE": "control, interleave, off, stage",
    "VLLM_SCV_MODE": "adaptive, graph, off",
}


@pytest.mark.parametrize(
    ("variable", "value", "near", "others"),
    [
        ("VLLM_NWOR_MODE", "stag", "stage", {}),
        ("VLLM_NWOR_MODE", "STAGE", "stage", {}),
        ("VLLM_SCV_MODE", "adaptiv", "adaptive", {}),
        ("VLLM_SCV_MODE", "stage", "", {}),
        ("VLLM_NWOR_BESIDE_PREFILL", "staged", "stage", {}),
        ("VLLM_NWOR_STAGE_BY", "copi", "copy", {}),
        ("VLLM_NWOR_ATTENTION", "merged", "merge", {}),
        ("VLLM_NWOR_DRAFTS", "on", "", {}),
        ("VLLM_NWOR_MODE", "interleave", "", DRAFTS),
        ("VLLM_NWOR_MODE", "stage", "", DRAFTS),
        ("VLLM_SCV_MODE", "graph", "", DRAFTS),
    ],
)
def test_what_is_refused_names_the_variable_the_value_and_what_to_write(
    variable: str, value: str, near: str, others: dict[str, str]
) -> None:
    naming = "unset VLLM_NWOR_DRAFTS" if others else near or KNOWN.get(variable, "")
    with refused(variable, value=value, near=near, naming=naming) as caught:
        read_settings({"VLLM_NWOR_MODE": "off", **others, variable: value})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.BAD_USAGE


@pytest.mark.long  # imports vLLM in a process of its own
def test_what_needs_a_gpu_is_refused_on_a_cpu_before_anything_is_hooked() -> None:
    said = run_python(
        REGISTER_AND_SAY.format(prepare="import vllm.platforms")
        + "from nwor_bench.plugin import attaching\nassert attaching._patches is None\n",
        VLLM_NWOR_MODE="off",
        VLLM_NWOR_STAGE_BY="copy",
    )
    (line,) = [line for line in said.splitlines() if "VLLM_NWOR_STAGE_BY" in line]
    assert line.startswith("VLLM_NWOR_STAGE_BY: 'copy' ")
    assert "CUDA device" in line


def test_without_the_variables_register_imports_neither_vllm_nor_torch() -> None:
    code = "import sys\nfrom nwor_bench.plugin import register\nregister()\n" + HEAVY
    assert run_python(code, VLLM_NWOR_DEBUG="1", VLLM_NWOR_MODE="") == ""


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [("version = lambda name: '0.30.2'", "0.30.2"), ("DISTRIBUTIONS = ('no',)", "not installed")],
)
def test_an_unsupported_vllm_is_one_clear_line_before_anything_is_imported(
    prepare: str, expected: str
) -> None:
    code = REGISTER_AND_SAY.format(prepare=f"nwor_bench.instruments.versions.{prepare}") + HEAVY
    said = run_python(code, VLLM_NWOR_MODE="stage")
    assert said.count("\n") == 1
    assert expected in said
    assert "make" in said
