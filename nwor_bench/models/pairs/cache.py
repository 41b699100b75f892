"""The cache of built pairs. A pair's folder is complete or absent.

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

Progress = Callable[[str], None]
"""Called with one short line when a step of a fetch begins."""

_RECIPE = 1
"""Increase it when the same source builds different files, so that old builds are not used."""


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The cache: `cache_dir`, else $NWOR_BENCH_CACHE, else $XDG_CACHE_HOME/nwor-bench or ~/.cache.

    The folder need not exist yet.
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser().resolve()
    if own := os.environ.get("NWOR_BENCH_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "nwor-bench"


def pair_folder(pair: ModelPair, cache_dir: str | Path | None = None) -> Path:
    """The pair's folder in the cache; it differs if the source (version, seed, ...) differs."""
    source = pair.packaged or pair.generated or pair.shape
    if source is None:
        raise ValueError(f"pair {pair.name} names folders of its own; nothing of it is cached")
    # Pairs that differ in the drafter alone share one build of the target.
    content = source.model_dump(exclude={"drafter"})
    recipe = json.dumps([_RECIPE, pair.source, content], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    stem = pair.packaged.package if pair.packaged else pair.source
    return cache_root(cache_dir) / f"{stem}-{digest}"


def build_once(folder: Path, build: Callable[[Path], None], progress: Progress) -> Path:
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
def _locked(path: Path, progress: Progress) -> Iterator[None]:
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
