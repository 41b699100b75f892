"""TOML files as editors leave them, and files that cannot be read."""

from pathlib import Path

from refusals import refused

from nwor_bench.workload.toml_file import StrictModel, read_toml


class Prompts(StrictModel):
    kind: str


class Sample(StrictModel):
    requests: int
    prompts: Prompts | None = None


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    path.write_bytes(b"\xef\xbb\xbfrequests = 3\r\n[prompts]\r\nkind = 5\r\n")
    with refused("sample.toml: prompts.kind", value=5):
        read_toml(path, Sample)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    causes = {"none.toml": FileNotFoundError, ".": IsADirectoryError, "latin.toml": ValueError}
    for name, cause in causes.items():
        with refused(tmp_path / name, cause=cause):
            read_toml(tmp_path / name, Sample)
