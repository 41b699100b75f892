"""Names for the shell to complete. It asks at every Tab, so nothing heavy is imported."""

from pathlib import Path

from nwor_bench.workload.resources import resource_dir


def scenarios(incomplete: str) -> list[str]:
    """Shipped scenarios."""
    return _beginning(_shipped(resource_dir("scenarios")), incomplete)


def pairs(incomplete: str) -> list[str]:
    """Shipped model pairs."""
    return _beginning(_shipped(resource_dir("scenarios") / "pairs"), incomplete)


def sweeps(incomplete: str) -> list[str]:
    """Shipped sweep files."""
    return _beginning(_shipped(resource_dir("sweeps")), incomplete)


def runs(incomplete: str) -> list[str]:
    """Run and sweep folders in runs/ and below the folder that is being typed."""
    typed = Path(incomplete)
    parents = {Path("runs"), typed if incomplete.endswith("/") else typed.parent}
    files = ("run.json", "sweep.json")
    found = [path for parent in parents for file in files for path in parent.glob(f"*/{file}")]
    return _beginning(sorted({str(path.parent) for path in found}), incomplete)


def _shipped(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
