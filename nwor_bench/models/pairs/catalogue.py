"""The pairs that ship with nwor-bench, and pairs in a file of the user's own."""

from pathlib import Path

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs.model import FolderSource, ModelPair
from nwor_bench.workload.resources import resource_dir
from nwor_bench.workload.toml_file import read_toml


def pair_names() -> list[str]:
    """Names of the shipped pairs, sorted."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def load_pair(name: str) -> ModelPair:
    """Read a shipped pair by its name, or any pair by the path of its .toml file.

    Raises ConfigError for an unknown name, and for a file that is not a valid pair.
    """
    if name.endswith(".toml"):
        path = Path(name).expanduser()
        return _with_folders_beside(path, read_toml(path, ModelPair))
    if name not in pair_names():
        raise ConfigError.unknown("pair", name, pair_names())
    path = _folder() / f"{name}.toml"
    return _with_folders_beside(path, read_toml(path, ModelPair))


def _folder() -> Path:
    return resource_dir("scenarios") / "pairs"


def _with_folders_beside(path: Path, pair: ModelPair) -> ModelPair:
    """Relative model folders in a pair file are meant relative to that file."""
    if pair.packaged is not None and pair.packaged.drafter is not None:
        drafter = str((path.parent / pair.packaged.drafter).resolve())
        packaged = pair.packaged.model_copy(update={"drafter": drafter})
        return pair.model_copy(update={"packaged": packaged})
    if pair.folder is None:
        return pair

    def beside(reference: str) -> str:
        folder = path.parent / reference
        return str(folder.resolve()) if folder.is_dir() else reference

    draft = pair.folder.draft
    source = FolderSource(
        target=beside(pair.folder.target), draft=None if draft is None else beside(draft)
    )
    return pair.model_copy(update={"folder": source})
