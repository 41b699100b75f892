"""CI: the workflow, the action, and the jobs of docs/ci.md."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_calls import parse

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs/ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def steps_of(block: str) -> list[dict[str, Any]]:
    """The steps of a whole workflow, or of a block that is some of them."""
    read = yaml.safe_load(block)
    return read if isinstance(read, list) else next(iter(read["jobs"].values()))["steps"]


def arguments(block: str) -> list[list[str]]:
    """What the block's uses of the action run."""
    used = [step for step in steps_of(block) if "/nwor-bench@" in step.get("uses", "")]
    assert all(set(step["with"]) == {"run"} for step in used)
    return [shlex.split(step["with"]["run"]) for step in used]


def test_the_workflow_runs_what_every_change_must_pass() -> None:
    workflow = yaml.safe_load((CHECKOUT / ".github/workflows/ci.yml").read_text())
    assert "pull_request" in workflow[True]  # YAML reads the bare word `on` as true
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert os.access(CHECKOUT / ".ci/run", os.X_OK)


def test_the_jobs_of_the_page_call_what_there_is() -> None:
    check, (sweep, compare) = map(arguments, BLOCKS)
    called = [parse(words) for words in (*check, sweep, compare)]
    assert called == ["check", "sweep", "compare"]
    assert compare[2] == sweep[sweep.index("--output") + 1]
    assert "--strict" in compare
    (upload,) = [s for s in steps_of(BLOCKS[1]) if "upload-artifact" in s.get("uses", "")]
    assert upload["with"]["path"] == f"{compare[2]}/"
    assert f"nwor-bench {shlex.join(sweep)}" in PAGE.rpartition("```")[2]  # and the baseline's


@pytest.mark.parametrize("code", [0, 3])
def test_the_action_ends_with_the_commands_code_and_shows_its_output(
    tmp_path: Path, code: int
) -> None:
    """The action's own script, with a stand-in for nwor-bench."""
    (action, summary) = tmp_path / "the action", tmp_path / "summary"
    command = action / ".venv/bin/nwor-bench"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nprintf "<%s>" "$@"\necho why >&2\nexit {code}\n')
    command.chmod(0o755)
    steps = yaml.safe_load((CHECKOUT / "action.yml").read_text())["runs"]["steps"]
    env = {
        "PATH": os.environ["PATH"],
        "COMMAND": """check MODEL --engine-args '{"seed": 1}'""",
        "GITHUB_ACTION_PATH": str(action),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    bash = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")  # as GitHub calls it
    done = subprocess.run([*bash, steps[-1]["run"]], env=env, capture_output=True, text=True)
    assert done.returncode == code
    said = '<check><MODEL><--engine-args><{"seed": 1}>why\n'
    assert done.stdout == said
    assert summary.read_text() == f"```\nnwor-bench {env['COMMAND']}\n{said}```\n"
