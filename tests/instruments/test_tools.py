"""Which of several installed profilers is taken."""

from pathlib import Path

import pytest

from nwor_bench.instruments.nsight import tools


@pytest.fixture(autouse=True)
def nothing_in_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)
    monkeypatch.setattr(tools, "ROOT", str(tmp_path))
    return tmp_path


def test_the_newest_version_is_taken_by_number(nothing_in_path: Path) -> None:
    for version in ("2025.9.1", "2025.10.0", "2024.11.3"):
        folder = nothing_in_path / "opt/nvidia/nsight-compute" / version
        folder.mkdir(parents=True)
        (folder / "ncu").touch()
    assert tools.find_tool("ncu").parent.name == "2025.10.0"
