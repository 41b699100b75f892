"""Faults in a TOML file are reported with file, table, key, value and remedy."""

from pathlib import Path

import pytest
from refusals import refused

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.records.types import NworMode
from nwor_bench.workload.toml_file import StrictModel, read_toml


class Prompts(StrictModel):
    kind: str
    min_chars: int = 0


class Sample(StrictModel):
    requests: int
    temperature: float = 0.0
    mode: NworMode = NworMode.OFF
    prompts: Prompts | None = None


def write(folder: Path, text: str) -> Path:
    path = folder / "sample.toml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_toml(write(folder, text), Sample)
    assert caught.value.exit_code is ExitCode.BAD_USAGE
    return str(caught.value)


def test_reads_a_valid_file(tmp_path: Path) -> None:
    text = 'requests = 3\ntemperature = 1\nmode = "stage"'
    sample = read_toml(write(tmp_path, text), Sample)
    assert sample.requests == 3
    assert sample.temperature == 1.0
    assert sample.mode is NworMode.STAGE


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    path.write_bytes(b"\xef\xbb\xbfrequests = 3\r\n[prompts]\r\nkind = 5\r\n")
    with refused("sample.toml: prompts.kind", value=5):
        read_toml(path, Sample)


def test_unknown_field_names_the_nearest_field(tmp_path: Path) -> None:
    message = error_of(tmp_path, "requests = 1\n\n# a comment\nrequsts = 2\n")
    assert "sample.toml: requsts = 2: unknown field; did you mean 'requests'?" in message


def test_unknown_nested_field_offers_the_fields_of_its_own_table(tmp_path: Path) -> None:
    message = error_of(tmp_path, 'requests = 1\n[prompts]\nkind = "a"\n  min_char = 2\n')
    assert "sample.toml: prompts.min_char = 2: unknown field" in message
    assert "known here: kind, min_chars" in message


def test_a_table_that_is_unknown_is_named_and_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[build-system]\nrequires = ['setuptools']\n")
    with refused(f"{path}: build-system", near="") as caught:
        read_toml(path, Sample)
    assert "setuptools" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "field", "remedy"),
    [
        ('requests = "3"', "requests: '3'", "write a valid integer"),
        ("requests = 3.0", "requests: 3.0", "write a valid integer"),
        ("requests = true", "requests: True", "write a valid integer"),
        ("requests = 1\ntemperature = nan", "temperature: nan", "write a finite number"),
        ('requests = 1\nmode = "stge"', "mode: 'stge'", "write 'off', 'stage' or 'control'"),
        ("requests = 1\nprompts = 4", "prompts: 4", "write a table"),
        ("requests = 1\nprompts = {kind = 4}", "prompts.kind: 4", 'write text in "double quotes"'),
        ("requests = 1\nprompts.kind = 4", "prompts.kind: 4", 'write text in "double quotes"'),
    ],
)
def test_mistyped_field(tmp_path: Path, line: str, field: str, remedy: str) -> None:
    message = error_of(tmp_path, f"# first\n{line}\n")
    assert f"sample.toml: {field} is invalid; {remedy}" in message


def test_missing_field_names_its_table(tmp_path: Path) -> None:
    message = error_of(tmp_path, "requests = 1\n\n[prompts]\nmin_chars = 1\n")
    assert "sample.toml: prompts.kind: is missing; add `kind = ...`" in message


def test_all_faults_are_listed(tmp_path: Path) -> None:
    message = error_of(tmp_path, 'requests = "a"\nb = 1\n[prompts]\nkind = 2\n')
    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "b = 1", "requests", "prompts.kind"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"),
    [("requests = 1\nmode = off\n", 2), ("a = 1\n\na = 2\n", 3), ("[prompts", 1)],
)
def test_syntax_error_names_the_line(tmp_path: Path, text: str, number: int) -> None:
    message = error_of(tmp_path, text)
    assert f"sample.toml:{number}: " in message
    assert "not valid TOML" in message
    assert "write `field = value`" in message


def test_unreadable_files(tmp_path: Path) -> None:
    with refused(tmp_path / "none.toml", cause=FileNotFoundError):
        read_toml(tmp_path / "none.toml", Sample)
    with refused(tmp_path, cause=IsADirectoryError):
        read_toml(tmp_path, Sample)
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    with refused(tmp_path / "latin.toml", cause=ValueError):
        read_toml(tmp_path / "latin.toml", Sample)


def test_models_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Prompts(kind="a").kind = "b"  # type: ignore[misc]
