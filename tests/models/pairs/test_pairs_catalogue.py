"""Pair files: the shipped ones are sound, faulty ones are refused with field and line."""

import json
from pathlib import Path

import pytest

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs import DEFAULT_PAIR, fetch_pair, load_pair, pair_names

FOLDER_PAIR = """\
name = "mine"
description = "my own"
source = "folder"
method = "draft_model"

[folder]
target = "target"
draft = "org/draft"
"""


def test_shipped_pairs_load_under_their_file_names() -> None:
    assert {"smollm2", "smollm2-ngram", "tiny", "tiny-ngram"} <= set(pair_names())
    assert DEFAULT_PAIR in pair_names()
    for name in pair_names():
        pair = load_pair(name)
        assert pair.name == name
        assert len(pair.description) > 10


def test_tiny_and_tiny_ngram_have_the_same_target() -> None:
    assert load_pair("tiny").generated == load_pair("tiny-ngram").generated


def test_pair_of_the_users_own_finds_folders_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FOLDER_PAIR)
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text("{}")
    ready = fetch_pair(load_pair(str(tmp_path / "mine.toml")))
    assert ready.target == str(tmp_path / "target")
    assert ready.draft == "org/draft"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('method = "draft_model"', 'method = "medusa"', 4, ["method", "medusa", "eagle"]),
        ('name = "mine"', 'nam = "mine"', 1, ["nam", "name"]),
        ("target = ", "targt = ", 7, ["targt", "target"]),
        ('description = "my own"', "description = 3", 2, ["description", "3"]),
        ("[folder]", "[generated]", 6, ["generated"]),
    ],
)
def test_faulty_pair_files_name_field_and_line(
    tmp_path: Path, old: str, new: str, line: int, words: list[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FOLDER_PAIR.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_pair(str(path))
    message = str(caught.value)
    assert all(word in message for word in words)
    assert f"{path}:{line}" in message


@pytest.mark.parametrize("source", ["packaged", "generated"])
def test_source_must_name_the_table_that_is_there(tmp_path: Path, source: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FOLDER_PAIR.replace('source = "folder"', f'source = "{source}"'))
    with pytest.raises(ConfigError, match=rf"table \[{source}\].*found: folder"):
        load_pair(str(path))


def test_missing_pair_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        load_pair("/no/gone.toml")


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", [name for name in pair_names() if load_pair(name).shape])
def test_transformers_takes_each_shape_that_ships(name: str, tmp_path: Path) -> None:
    """As vLLM will, when an engine starts."""
    from transformers import AutoConfig

    pair = fetch_pair(load_pair(name), tmp_path)
    for part in filter(None, (pair.target, pair.draft)):
        written = json.loads((Path(part) / "config.json").read_text())
        assert AutoConfig.from_pretrained(part).vocab_size == written["vocab_size"]
