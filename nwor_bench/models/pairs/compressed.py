"""Drafters whose weights are compressed: unpacked once, into the cache of pairs."""

import hashlib
import json
from pathlib import Path

from nwor_bench.errors import BenchError, ConfigError
from nwor_bench.models.pairs.cache import Progress, build_once, cache_root

WEIGHTS = "model.safetensors"
COMPRESSED = f"{WEIGHTS}.xz"

_RESTORE = (
    "restore that file (`git checkout` it, or install nwor-bench again; compress weights of your "
    "own again)"
)


def require_weights(field: str, folder: str) -> None:
    """Refuse a folder with neither plain nor compressed weights. Raises ConfigError."""
    if not any((Path(folder) / name).is_file() for name in (WEIGHTS, COMPRESSED)):
        raise ConfigError.for_field(
            field, str(Path(folder) / COMPRESSED), f"it is not there; {_RESTORE}"
        )


def unpacked(model: str, cache_dir: str | Path | None, progress: Progress) -> str:
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

    # The copy keeps the folder's name: `compare` tells drafters of two machines apart by it.
    place = cache_root(cache_dir) / f"{folder.name}-{digest}"
    return str(build_once(place, build, progress) / folder.name)


def _read(folder: Path) -> dict[str, bytes]:
    """The folder's files by name, sorted."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            try:
                found[path.name] = path.read_bytes()
            except OSError as error:
                raise BenchError.at(
                    path, f"cannot be read ({error.strerror}); {_RESTORE}"
                ) from error
    return found


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
