"""Exports of Nsight Systems (tests/data/nsys_exports.md), unpacked once for all tests."""

import gzip
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

DATA = Path(__file__).resolve().parent / "data"
_FOLDER = TemporaryDirectory(prefix="nwor-nsys-exports-")


@cache
def unpacked(name: str) -> Path:
    """The export `NAME.sqlite` of tests/data as a file; tests only read it."""
    path = Path(_FOLDER.name) / f"{name}.sqlite"
    path.write_bytes(gzip.decompress((DATA / f"{name}.sqlite.gz").read_bytes()))
    return path
