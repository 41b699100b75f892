"""Who may import whom: the contracts of pyproject.toml, and the rules that they cannot say."""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest
from importlinter import cli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"
PROJECT = tomllib.loads(PROJECT_FILE.read_text())


def test_imports_keep_the_contracts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_configure_logging", lambda _: None)  # it disables all other loggers
    code = cli.lint_imports(config_filename=str(PROJECT_FILE), no_cache=True, no_logo=True)
    assert code == 0, capsys.readouterr().out


def test_floors_and_rooms_stay_few() -> None:
    floors = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    assert len(floors) <= 10
    assert len([room for floor in floors for room in floor.split("|")]) <= 15


def packages_imported_by(package: str) -> set[str]:
    """Packages outside the checkout and the standard library, wherever they are imported."""
    graph = grimp.build_graph(
        "nwor_bench", "nwor_kernels", include_external_packages=True, cache_dir=None
    )
    modules = {package} | graph.find_descendants(package)
    found = set().union(*map(graph.find_modules_directly_imported_by, modules))
    return {name for name in found if graph.is_module_squashed(name)} - sys.stdlib_module_names


def test_kernels_need_torch_and_triton_and_statistics_numpy_and_scipy() -> None:
    assert packages_imported_by("nwor_kernels") == {"torch", "triton"}
    assert packages_imported_by("nwor_bench.stats") == {"numpy", "scipy"}


NOT_OURS_TO_INSTALL = {"torch", "triton", "cuda", "flashinfer", "vllm", "pydantic_core"}
"""Packages that come with vLLM (PyTorch with Triton and CUDA's bindings, FlashInfer), pydantic."""


def undeclared(declared: Iterable[str]) -> set[str]:
    """Packages that the harness imports and that are not among these."""
    owners, known = packages_distributions(), {canonicalize_name(name) for name in declared}
    return {
        name
        for name in packages_imported_by("nwor_bench") - NOT_OURS_TO_INSTALL
        if not known & {canonicalize_name(owner) for owner in owners.get(name, [name])}
    }


@pytest.mark.slow
def test_every_imported_package_is_a_dependency() -> None:
    """So a wheel without its extras has all that a sweep and a report need beside vLLM."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["counters"], *extras["ray"]]
    declared = {Requirement(line).name for line in lines} | {"cupti"}  # not installed on a CPU
    assert undeclared(declared) == set()
    assert undeclared(declared - {"scipy"}) == {"scipy"}


LOADED = """
import sys
from importlib import import_module
from pkgutil import walk_packages

for package in sys.argv[2:]:
    found = import_module(f"nwor_bench.{package}")
    for module in walk_packages(getattr(found, "__path__", []), f"{found.__name__}."):
        import_module(module.name)
print(*sorted(set(sys.argv[1].split()) & set(sys.modules)))
"""


@pytest.mark.slow  # processes
@pytest.mark.parametrize(
    ("packages", "never"),
    [
        ("cli.app cli.commands", "torch vllm pandas scipy pydantic transformers matplotlib nvtx"),
        ("stats records workload models analysis report instruments engine", "torch vllm nvtx"),
    ],
    ids=["help answers at once", "analysis and report need no engine"],
)
def test_importing_every_module_loads_none_of(packages: str, never: str) -> None:
    """Libraries in functions may be imported later; here nothing may import them, ours or not."""
    command = [sys.executable, "-c", LOADED, never, *packages.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
