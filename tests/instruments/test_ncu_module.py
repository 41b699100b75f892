"""Where Nsight Compute's own Python module is found."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refused

from nwor_bench.instruments.nsight import tools
from nwor_bench.instruments.nsight.ncu import MODULE, load_module, module_folders


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty machine, and no module from before."""
    monkeypatch.setattr(tools, "ROOT", str(tmp_path))
    before = list(sys.path)
    sys.modules.pop(MODULE, None)
    yield tmp_path
    assert sys.path == before
    sys.modules.pop(MODULE, None)


def package(folder: Path, name: str) -> Path:
    """An installed package; its folder with the module."""
    inside = folder / "extras" / "python"
    inside.mkdir(parents=True)
    (inside / f"{MODULE}.py").write_text(f"name = {name!r}\n")
    return inside


def tool(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Version {version}.0 (build 36398880)'\n")
    path.chmod(0o755)
    return path


def test_the_package_of_the_tool_itself(root: Path) -> None:
    inside = package(root / "anywhere", "own")
    package(root / "opt/nvidia/nsight-compute/2025.3.1", "other")
    for path in (root / "anywhere/ncu", root / "anywhere/target/linux-desktop-x64/ncu"):
        assert module_folders(tool(path, "2025.3.1"))[0] == inside


def test_a_script_of_the_toolkit_has_it_elsewhere(root: Path) -> None:
    """As on a machine with CUDA's packages: a link to the toolkit, a script, three packages."""
    ncu = tool(root / "usr/local/cuda-13.0/bin/ncu", "2025.3.1")
    (root / "usr/local/cuda").symlink_to(root / "usr/local/cuda-13.0")
    versions = ("2024.3.2", "2025.3.1", "2025.10.0")
    folders = {v: package(root / "opt/nvidia/nsight-compute" / v, v) for v in versions}
    wanted = [folders[v] for v in ("2025.10.0", "2025.3.1", "2024.3.2")]
    assert module_folders(root / "usr/local/cuda/bin/ncu") == wanted
    assert load_module(ncu).name == "2025.10.0"


def test_without_a_tool_the_newest_is_taken(root: Path) -> None:
    for version in ("2025.9.1", "2025.10.0"):
        package(root / "opt/nvidia/nsight-compute" / version, version)
    assert load_module(None).name == "2025.10.0"


def test_pythonpath_goes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(root / "opt/nvidia/nsight-compute/2026.1.0", "installed")
    with monkeypatch.context() as inside:
        inside.syspath_prepend(str(package(root / "mine", "mine")))
        assert load_module(tool(root / "bin/ncu", "2026.1.0")).name == "mine"


def test_one_that_does_not_load_gives_way_to_the_next(root: Path) -> None:
    broken = package(root / "opt/nvidia/nsight-compute/2026.1.0", "broken")
    (broken / f"{MODULE}.py").write_text("import _no_such_library_of_ncu\n")
    package(root / "opt/nvidia/nsight-compute/2025.1.0", "older")
    assert load_module(None).name == "older"


def test_none_is_one_message_with_the_remedy(root: Path) -> None:
    package(root / "opt/nvidia/nsight-compute/2026.1.0", "x").joinpath(f"{MODULE}.py").unlink()
    with refused(f"profile ncu: the module {MODULE}", naming="PYTHONPATH"):
        load_module(None)
