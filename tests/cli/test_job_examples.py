"""The examples of a Slurm array and a Kubernetes Job: a run per task, in one folder of runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from command_calls import parse

import nwor_bench

SWEEPS = Path(__file__).resolve().parents[2] / "sweeps"
SLURM = SWEEPS / "slurm-array.sh"
KUBERNETES = SWEEPS / "kubernetes-job.yml"


def job() -> dict:
    return yaml.safe_load(KUBERNETES.read_text())


def container() -> dict:
    (only,) = job()["spec"]["template"]["spec"]["containers"]
    return only


def script_of(example: Path) -> tuple[str, str]:
    """The shell script of a task, and the variable that numbers it."""
    if example == SLURM:
        return SLURM.read_text(), "SLURM_ARRAY_TASK_ID"
    (script,) = container()["args"]
    return script, "JOB_COMPLETION_INDEX"


def call(example: Path, task: int, folder: Path) -> list[str]:
    """What a task gives to nwor-bench, which a stand-in writes down."""
    script, variable = script_of(example)
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "nwor-bench").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > said\n')
    (tools / "nwor-bench").chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", variable: str(task)}
    subprocess.run(["bash", "-euc", script], cwd=folder, env=env, check=True)
    return (folder / "said").read_text().splitlines()


def tasks_of(example: Path) -> int:
    if example == KUBERNETES:
        spec = job()["spec"]
        assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
        return spec["completions"]
    (last,) = re.findall(r"^#SBATCH --array=0-(\d+)$", SLURM.read_text(), re.MULTILINE)
    return int(last) + 1


@pytest.mark.parametrize("example", [SLURM, KUBERNETES], ids=lambda path: path.name)
def test_each_task_measures_a_run_of_its_own(example: Path, tmp_path: Path) -> None:
    calls = [call(example, task, tmp_path) for task in range(tasks_of(example))]
    assert [parse(arguments) for arguments in calls] == ["sweep"] * len(calls)
    folders = {Path(arguments[arguments.index("--output") + 1]) for arguments in calls}
    assert len(folders) == len(calls) > 1
    (above,) = {folder.parent for folder in folders}
    assert f"nwor-bench report {above}" in example.read_text()
    with pytest.raises(subprocess.CalledProcessError):  # a task without a value
        call(example, len(calls), tmp_path)


@pytest.mark.parametrize("example", [SLURM, KUBERNETES], ids=lambda path: path.name)
def test_a_task_that_was_cut_short_resumes(example: Path, tmp_path: Path) -> None:
    begun = call(example, 0, tmp_path)
    run = Path(begun[begun.index("--output") + 1])
    (tmp_path / run).mkdir(parents=True)
    (tmp_path / run / "run.json").touch()
    resumed = call(example, 0, tmp_path)
    assert resumed == ["sweep", "--resume", str(run)]
    assert parse(resumed) == "sweep"


def test_each_task_has_one_gpu() -> None:
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "#SBATCH --gres=gpu:1\n" in SLURM.read_text()


def test_the_job_runs_the_image_of_this_version_where_its_volume_is() -> None:
    assert container()["image"] == f"nwor-bench:{nwor_bench.__version__}"
    dockerfile = (SWEEPS.parent / "Dockerfile").read_text()
    (folder,) = re.findall(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)
    (mount,) = container()["volumeMounts"]
    (volume,) = job()["spec"]["template"]["spec"]["volumes"]
    assert (mount["mountPath"], mount["name"]) == (f"{folder}/runs", volume["name"])
