"""A drafter's compressed weights are unpacked once; damaged or missing ones are refused."""

import lzma
import sys
from pathlib import Path

import pytest
from refusals import refused

from nwor_bench.errors import BenchError
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.models.pairs.cache import COMPRESSED, WEIGHTS, require_weights, unpacked

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["EagleLlamaForCausalLM"]}')
    (folder / COMPRESSED).write_bytes(lzma.compress(CONTENT, check=lzma.CHECK_SHA256))
    return folder


def test_a_second_time_unpacks_nothing_and_changed_weights_are_unpacked_anew(
    head: Path, tmp_path: Path
) -> None:
    steps: list[str] = []
    before = sorted(head.iterdir())
    first = unpacked(str(head), tmp_path / "cache", steps.append)
    assert unpacked(str(head), tmp_path / "cache", steps.append) == first
    assert len(steps) == 1
    assert (Path(first) / WEIGHTS).read_bytes() == CONTENT
    assert sorted(head.iterdir()) == before  # a checkout may be read-only
    (head / COMPRESSED).write_bytes(lzma.compress(CONTENT[1:]))
    second = unpacked(str(head), tmp_path / "cache", steps.append)
    assert (Path(second) / WEIGHTS).read_bytes() == CONTENT[1:]


@pytest.mark.parametrize("with_compressed", [False, True])
def test_plain_weights_stay_where_they_are(
    head: Path, tmp_path: Path, with_compressed: bool
) -> None:
    (head / WEIGHTS).write_bytes(b"own")
    if not with_compressed:
        (head / COMPRESSED).unlink()
    assert unpacked(str(head), tmp_path / "cache", print) == str(head)
    assert unpacked("org/name", tmp_path / "cache", print) == "org/name"
    assert not (tmp_path / "cache").exists()


PACKED = lzma.compress(CONTENT, check=lzma.CHECK_SHA256)
FLIPPED = bytes(byte ^ (at == len(PACKED) // 2) for at, byte in enumerate(PACKED))


@pytest.mark.parametrize("content", [FLIPPED, PACKED[:-9], b"", b"x"])
def test_damaged_weights_are_refused_by_name_and_leave_nothing(
    head: Path, tmp_path: Path, content: bytes
) -> None:
    (head / COMPRESSED).write_bytes(content)
    with refused(head / COMPRESSED, BenchError, cause=lzma.LZMAError):
        unpacked(str(head), tmp_path / "cache", print)
    assert [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == []


def test_a_python_without_lzma_is_told_the_command(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    with refused(
        head / COMPRESSED, BenchError, cause=ImportError, naming=f"xz -dk {head / COMPRESSED}"
    ):
        unpacked(str(head), tmp_path / "cache", print)


def test_missing_weights_of_a_shipped_drafter_are_refused_by_name(head: Path) -> None:
    require_weights("drafter", str(head))
    (head / COMPRESSED).unlink()
    with refused("drafter", value=str(head / COMPRESSED)):
        require_weights("drafter", str(head))


def test_a_drafter_named_on_the_command_line_is_unpacked_too(head: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    pair = resolve_pair(
        target_model=str(target), draft_model=str(head), cache_dir=tmp_path / "cache"
    )
    assert pair.draft == unpacked(str(head), tmp_path / "cache", print) != str(head)
