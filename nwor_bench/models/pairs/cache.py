"""The cache of built pairs and unpacked drafters. A folder in it is complete or absent.

A pair is built in a hidden folder beside its final one, then renamed. A lock keeps two processes
from building the same pair; the operating system releases it if its process dies.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nwor_bench.errors import BenchError, ConfigError
from nwor_bench.models.pairs.pair import ModelPair
from nwor_bench.records.user_cache import cache_root

OnProgress = Callable[[str], None]
"""Called with one short line when a step of a fetch begins."""

_RECIPE = 1
"""Increase it when the same source builds different files, so that old builds are not used."""

WEIGHTS = "model.safetensors"
COMPRESSED = f"{WEIGHTS}.xz"

_RESTORE = (
    "restore that file (`git checkout` it, or install nwor-bench again; compress weights of your "
    "own again)"
)


def pair_folder(pair: ModelPair, cache_dir: str | Path | None = None) -> Path:
    """The pair's folder in the cache; it differs if the source (version, seed, ...) differs."""
    source = pair.packaged or pair.generated or pair.shape
    assert source is not None  # the model's validator holds this
    # Pairs that differ only in the drafter share one build of the target.
    content = source.model_dump(exclude={"drafter"})
    recipe = json.dumps([_RECIPE, pair.source, content], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    stem = pair.packaged.package if pair.packaged else pair.source
    return cache_root(cache_dir) / f"{stem}-{digest}"


def build_once(folder: Path, build: Callable[[Path], None], progress: OnProgress) -> Path:
    """Make `folder` by calling `build` on an empty folder beside it, unless it exists.

    If `build` raises, its work is removed and the exception passes through. Raises ConfigError
    if the cache cannot be written, BenchError if writing fails half-way.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock", progress):
            if not folder.is_dir():  # another process may have built it while we waited
                _build_beside(folder, build)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise _not_writable(folder.parent, error) from error
    except OSError as error:
        raise BenchError.at(
            f"cache {folder.parent}",
            f"writing failed ({error.strerror or error}); free some "
            "space (1 GB is enough) or set NWOR_BENCH_CACHE to another folder",
        ) from error
    return folder


def _build_beside(folder: Path, build: Callable[[Path], None]) -> None:
    # We hold the lock, so an existing folder was left by a killed process.
    work = folder.parent / f".{folder.name}.building"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        build(work)
        _flush(work)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Force the files to disk, so that the renamed folder is complete after a power cut."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, progress: OnProgress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; reports progress if it has to wait."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that builds the same pair")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _not_writable(root: Path, error: OSError) -> ConfigError:
    return ConfigError.for_field(
        "cache", str(root), f"it cannot be written ({error.strerror}); "
        "set NWOR_BENCH_CACHE to a folder that can",
    )  # fmt: skip


def require_weights(field: str, folder: str) -> None:
    """Refuse a folder with neither plain nor compressed weights. Raises ConfigError."""
    if not any((Path(folder) / name).is_file() for name in (WEIGHTS, COMPRESSED)):
        raise ConfigError.for_field(
            field, str(Path(folder) / COMPRESSED), f"it is not there; {_RESTORE}"
        )


def unpacked(model: str, cache_dir: str | Path | None, progress: OnProgress) -> str:
    """`model`, or the copy of it in the cache if it is a folder whose weights are compressed.

    The copy has the folder's name, plain weights and all other files; changed files make another
    copy. xz stores a checksum of the weights, and unpacking compares it. Raises BenchError if a
    file is damaged or cannot be read, ConfigError if the cache cannot be written.
    """
    folder = Path(model)
    if (folder / WEIGHTS).is_file() or not (folder / COMPRESSED).is_file():
        return model
    files = _read(folder)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:12]

    def build(work: Path) -> None:
        progress("unpacking the drafter")
        weights = _decompressed(folder / COMPRESSED, files.pop(COMPRESSED))
        (work / folder.name).mkdir()
        for name, content in {**files, WEIGHTS: weights}.items():
            (work / folder.name / name).write_bytes(content)

    # The copy keeps the folder's name: `compare` identifies drafters by it.
    place = cache_root(cache_dir) / f"{folder.name}-{digest}"
    return str(build_once(place, build, progress) / folder.name)


def _read(folder: Path) -> dict[str, bytes]:
    """The folder's files by name, sorted."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            try:
                files[path.name] = path.read_bytes()
            except OSError as error:
                raise BenchError.at(
                    path, f"cannot be read ({error.strerror}); {_RESTORE}"
                ) from error
    return files


def _decompressed(path: Path, content: bytes) -> bytes:
    try:
        import lzma
    except ImportError as error:  # Python may be built without it
        raise BenchError.at(
            path, f"this Python has no lzma module to unpack it; run `xz -dk {path}`"
        ) from error
    try:
        return lzma.decompress(content)
    except lzma.LZMAError as error:
        raise BenchError.at(path, f"cannot be unpacked ({error}); {_RESTORE}") from error
