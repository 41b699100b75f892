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


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"VLLM_NWOR_MODE": ""},
        {"VLLM_NWOR_MODE": "", "VLLM_SCV_MODE": ""},
        {"VLLM_NWOR_DEBUG": "1"},
        {"NWOR_MODE": "stage"},
        {"VLLM_NWOR_DRAFTS": ""},
    ],
)
def test_without_a_mode_there_are_no_settings(environ):
    assert read_settings(environ) is None


@pytest.mark.parametrize(
    ("environ", "nwor_mode", "scv_mode"),
    [
        ({"VLLM_NWOR_MODE": "stage"}, NworMode.STAGE, ScvMode.OFF),
        ({"VLLM_NWOR_MODE": "off"}, NworMode.OFF, ScvMode.OFF),
        ({"VLLM_SCV_MODE": "graph"}, NworMode.OFF, ScvMode.GRAPH),
        ({"VLLM_NWOR_MODE": "", "VLLM_SCV_MODE": "adaptive"}, NworMode.OFF, ScvMode.ADAPTIVE),
        ({"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "off"}, NworMode.STAGE, ScvMode.OFF),
    ],
)
def test_one_mode_is_enough_and_the_other_is_off(environ, nwor_mode, scv_mode):
    assert read_settings(environ) == PluginSettings(nwor_mode, scv_mode, debug=False)


@pytest.mark.parametrize(
    ("scv", "read"),
    [
        (None, ScvMode.ADAPTIVE),
        ("", ScvMode.ADAPTIVE),
        ("graph", ScvMode.GRAPH),
        ("off", ScvMode.OFF),
    ],
)
def test_in_turns_stage_validates_adaptively_unless_told_otherwise(scv, read):
    environ = {"VLLM_NWOR_MODE": "interleave"} | ({} if scv is None else {"VLLM_SCV_MODE": scv})
    settings = read_settings(environ)
    assert settings == PluginSettings(NworMode.STAGE, read, debug=False, interleave=True)
    assert settings.mode_name == "interleave"


@pytest.mark.parametrize("modes", [{}, {"VLLM_NWOR_MODE": "off", "VLLM_SCV_MODE": ""}])
def test_draft_counts_alternate_in_off(modes):
    settings = read_settings({"VLLM_NWOR_DRAFTS": "interleave", **modes})
    assert settings == PluginSettings(NworMode.OFF, ScvMode.OFF, debug=False, drafts=True)
    assert settings.mode_name == "off"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_NWOR_MODE", "interleave"),
        ("VLLM_NWOR_MODE", "stage"),
        ("VLLM_SCV_MODE", "graph"),
    ],
)
def test_draft_counts_and_modes_do_not_alternate_together(name, value):
    with refused(name, value=value, naming="unset VLLM_NWOR_DRAFTS"):
        read_settings({"VLLM_NWOR_DRAFTS": "interleave", name: value})


def test_an_unknown_value_of_the_draft_counts():
    with refused("VLLM_NWOR_DRAFTS", value="on", naming="interleave"):
        read_settings({"VLLM_NWOR_DRAFTS": "on"})


@pytest.mark.parametrize(
    ("value", "debug"), [("1", True), ("yes", True), ("0", False), ("", False), (None, False)]
)
def test_debug(value, debug):
    environ = {"VLLM_NWOR_MODE": "stage"} | ({} if value is None else {"VLLM_NWOR_DEBUG": value})
    assert read_settings(environ).debug is debug


@pytest.mark.parametrize(
    ("variable", "value", "nearest"),
    [
        ("VLLM_NWOR_MODE", "stag", "stage"),
        ("VLLM_NWOR_MODE", "STAGE", ""),
        ("VLLM_NWOR_MODE", "graph", ""),
        ("VLLM_SCV_MODE", "adaptiv", "adaptive"),
        ("VLLM_SCV_MODE", "stage", ""),
        ("VLLM_NWOR_BESIDE_PREFILL", "staged", "stage"),
        ("VLLM_NWOR_STAGE_BY", "copi", "copy"),
        ("VLLM_NWOR_ATTENTION", "merged", "merge"),
    ],
)
def test_an_unknown_mode_names_the_variable_the_value_and_what_is_known(variable, value, nearest):
    known = {
        "VLLM_NWOR_MODE": "control, interleave, off, stage",
        "VLLM_SCV_MODE": "adaptive, graph, off",
    }
    naming = known.get(variable, nearest)
    with refused(variable, value=value, near=nearest, naming=naming) as caught:
        read_settings({"VLLM_NWOR_MODE": "off", variable: value})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.BAD_USAGE


@pytest.mark.parametrize(
    ("environ", "by", "needs_gpu"),
    [
        ({}, StageBy.REFERENCE, None),
        ({"VLLM_NWOR_STAGE_BY": ""}, StageBy.REFERENCE, None),
        ({"VLLM_NWOR_STAGE_BY": "reference"}, StageBy.REFERENCE, None),
        ({"VLLM_NWOR_STAGE_BY": "copy"}, StageBy.COPY, "VLLM_NWOR_STAGE_BY"),
    ],
)
def test_how_drafts_are_held(environ, by, needs_gpu):
    settings = read_settings({"VLLM_NWOR_MODE": "stage", **environ})
    assert (settings.stage_by, settings.needs_gpu) == (by, needs_gpu)
    assert read_settings(environ) is None  # by themselves they switch nothing on


@pytest.mark.long  # imports vLLM in a process of its own
def test_on_a_cpu_they_are_refused_before_anything_is_hooked():
    said = run_python(
        REGISTER_AND_SAY.format(prepare="import vllm.platforms")
        + "from nwor_bench.plugin import attaching\nassert attaching._patches is None\n",
        VLLM_NWOR_MODE="off",
        VLLM_NWOR_STAGE_BY="copy",
    )
    (line,) = [line for line in said.splitlines() if "VLLM_NWOR_STAGE_BY" in line]
    assert line.startswith("VLLM_NWOR_STAGE_BY: 'copy' ")
    assert "CUDA device" in line


def test_without_the_variables_register_imports_neither_vllm_nor_torch():
    code = "import sys\nfrom nwor_bench.plugin import register\nregister()\n" + HEAVY
    assert run_python(code) == ""
    assert run_python(code, VLLM_NWOR_DEBUG="1", VLLM_NWOR_MODE="") == ""


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        ("nwor_bench.instruments.versions.version = lambda name: '0.30.2'", "0.30.2"),
        (
            "nwor_bench.instruments.versions.DISTRIBUTIONS = ('no-such-distribution',)",
            "not installed",
        ),
    ],
)
def test_an_unsupported_vllm_is_one_clear_line_before_anything_is_imported(prepare, expected):
    code = REGISTER_AND_SAY.format(prepare=prepare) + HEAVY
    said = run_python(code, VLLM_NWOR_MODE="stage")
    assert said.count("\n") == 1
    assert expected in said
    assert "make" in said
