"""Faults in a TOML file are reported with file, line, field, value and remedy."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.records.types import NworMode
from nwor_bench.workload.toml_file import StrictModel, dotted, read_toml
from nwor_bench.workload.toml_lines import LineIndex


class Prompts(StrictModel):
    kind: str
    min_chars: int = 0


class Sample(StrictModel):
    requests: int
    temperature: float = 0.0
    mode: NworMode = NworMode.OFF
    prompts: Prompts | None = None
    more: tuple[Prompts, ...] = ()


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
    text = (
        'requests = 3\ntemperature = 1\nmode = "stage"\n[[more]]\nkind = "a"\n[[more]]\nkind = "b"'
    )
    sample = read_toml(write(tmp_path, text), Sample)
    assert sample.requests == 3
    assert sample.temperature == 1.0
    assert sample.mode is NworMode.STAGE
    assert [prompts.kind for prompts in sample.more] == ["a", "b"]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    path.write_bytes(b"\xef\xbb\xbfrequests = 3\r\n[prompts]\r\nkind = 5\r\n")
    with refused("sample.toml:3: prompts.kind", value=5):
        read_toml(path, Sample)


def test_unknown_field_names_line_and_nearest_field(tmp_path: Path) -> None:
    message = error_of(tmp_path, "requests = 1\n\n# a comment\nrequsts = 2\n")
    assert "sample.toml:4: requsts = 2: unknown field; did you mean 'requests'?" in message


def test_unknown_nested_field_offers_the_fields_of_its_own_table(tmp_path: Path) -> None:
    message = error_of(tmp_path, 'requests = 1\n[prompts]\nkind = "a"\n  min_char = 2\n')
    assert "sample.toml:4: prompts.min_char = 2: unknown field" in message
    assert "known here: kind, min_chars" in message


def test_a_table_that_is_unknown_is_named_and_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[build-system]\nrequires = ['setuptools']\n")
    with refused(f"{path}:1: build-system", near="") as caught:
        read_toml(path, Sample)
    assert "setuptools" not in str(caught.value)


def test_unknown_field_in_an_array_of_tables(tmp_path: Path) -> None:
    message = error_of(tmp_path, 'requests = 1\n[[more]]\nkind="a"\n[[more]]\nkind="b"\nkid=1\n')
    assert "sample.toml:6: more[1].kid = 1: unknown field; did you mean 'kind'?" in message


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
    number = 1 + len(line.splitlines())
    assert f"sample.toml:{number}: {field} is not usable; {remedy}" in message


def test_missing_field_names_the_line_of_its_table(tmp_path: Path) -> None:
    message = error_of(tmp_path, "requests = 1\n\n[prompts]\nmin_chars = 1\n")
    assert "sample.toml:3: prompts.kind: is missing; add `kind = ...`" in message


def test_all_faults_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    message = error_of(tmp_path, 'requests = "a"\n' + "\n" * 9 + "b = 1\n[prompts]\nkind = 2\n")
    assert [line.split(":")[1] for line in message.splitlines()] == ["1", "11", "13"]


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


def test_dotted() -> None:
    assert dotted(("a", 0, "b", "c")) == "a[0].b.c"


def test_hostile_text_around_the_field() -> None:
    text = (
        '"a.b" = """\nx = 1\n[no]\n\\""" still inside\n"""""\n'  # lines 1-5
        "'#' = '''\nc = [\n''''\n"  # 6-8
        'd = [ # ] not the end\n  1,\n  { e = 2, \'f g\'.h = "}\\"]" },\n]\n'  # 9-12
        "i . j = 1979-05-27 07:32:00 # k = 3\n"  # 13
        "[[t]]\n[t.u]\nv = 1\n[ t . w ]\nx = 1\n[[t]]\nv = 2\n[t.u]\ny = 3"  # 14-22
    )
    tomllib.loads(text)
    index = LineIndex(text)
    assert index.line_of(("a.b",)) == 1
    assert index.line_of(("#",)) == 6
    assert index.line_of(("d",)) == 9
    assert index.line_of(("d", 0)) == 10
    assert index.line_of(("d", 1, "f g", "h")) == 11
    assert index.line_of(("i", "j")) == 13
    assert index.line_of(("t", 0, "u", "v")) == 16
    assert index.line_of(("t", 0, "w", "x")) == 18
    assert index.line_of(("t", 1, "v")) == 20
    assert index.line_of(("t", 1, "u", "y")) == 22
    assert index.line_of(("t", 1, "u", "missing")) == 21
    assert index.line_of(("k",)) == 1
    assert ("x",) not in index.lines
    assert ("no",) not in index.lines


# A generated document: every value is unique, so that its line can be found independently
# of any parsing, by looking for the number in the text.
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
keys = st.one_of(st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True), texts)
trees = st.recursive(
    st.just(None) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


class Writer:
    """Writes a tree as TOML in randomly chosen spellings, and remembers where each leaf went."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.text = ""
        self.expected: dict[tuple[str | int, ...], int] = {}

    def put(self, text: str) -> None:
        self.text += text

    def key(self, key: str) -> str:
        is_bare = key != "" and key.isascii() and key.replace("-", "a").replace("_", "a").isalnum()
        spellings = [json.dumps(key, ensure_ascii=False).replace("\x7f", "\\u007f")]
        if key.isprintable() and "'" not in key:
            spellings.append(f"'{key}'")
        return self.draw(st.sampled_from(spellings + [key] * is_bare))

    def value(self, tree: object, path: tuple[str | int, ...]) -> None:
        self.expected[path] = self.text.count("\n") + 1
        if tree is None:
            self.put(self.draw(st.sampled_from(["1", "-2.5e3", "true", "07:32:00", "[]", "{}"])))
        elif isinstance(tree, str):
            self.string(tree)
        elif isinstance(tree, list):
            self.put("[")
            for i, item in enumerate(tree):
                self.put(self.draw(st.sampled_from(["", " ", "\n", " # ], } ' \"\n\t"])))
                self.value(item, (*path, i))
                self.put(self.draw(st.sampled_from([",", " ,", "\n,"])))
            self.put("]")
        elif isinstance(tree, dict):
            self.put("{ ")
            for i, (key, item) in enumerate(tree.items()):
                self.put(", " if i else "")
                self.put(f"{self.key(key)} = ")
                self.value(item, (*path, key))
            self.put("}")

    def string(self, value: str) -> None:
        quoted = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        style = self.draw(st.sampled_from(["basic", "multi", "literal"]))
        if style == "multi":
            self.put(
                f'"""\n{quoted[1:-1]}\n{self.draw(st.sampled_from(["", chr(34), chr(34) * 2]))}"""'
            )
        elif style == "literal" and value.isprintable() and "'" not in value:
            self.put(f"'{value}'" if self.draw(st.booleans()) else f"'''\n{value}\n'''")
        else:
            self.put(quoted)

    def body(self, tree: dict, path: tuple[str | int, ...]) -> None:
        """Plain fields first, then sub-tables under headers, as TOML demands."""
        later = []
        for key, item in tree.items():
            self.put(self.draw(st.sampled_from(["", "\n", "# [a] = 1\n", "  "])))
            if isinstance(item, dict) and self.draw(st.booleans()):
                later.append((key, item, False))
            elif (
                isinstance(item, list)
                and item
                and all(isinstance(element, dict) for element in item)
                and self.draw(st.booleans())
            ):
                later.append((key, item, True))
            else:
                self.put(f"{self.key(key)} = ")
                self.value(item, (*path, key))
                self.put("\n")
        for key, item, is_array in later:
            for i, element in enumerate(item if is_array else [item]):
                inner = path + (key,) + ((i,) if is_array else ())
                name = ".".join(self.key(part) for part in inner if isinstance(part, str))
                self.put(self.draw(st.sampled_from(["", "\n"])))
                self.expected[inner] = self.text.count("\n") + 1
                self.put(f"[[{name}]]\n" if is_array else f"[{name}]\n")
                self.body(element, inner)


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict]:
    writer = Writer(draw)
    writer.body(draw(st.dictionaries(keys, trees, max_size=4)), ())
    return writer.text, writer.expected


@pytest.mark.slow
@given(documents(), st.booleans())
def test_every_field_is_found_on_its_line(document: tuple[str, dict], windows: bool) -> None:
    text, expected = document
    tomllib.loads(text)
    index = LineIndex(text.replace("\n", "\r\n") if windows else text)
    found = {path: index.lines.get(path) for path in expected}
    assert found == expected
