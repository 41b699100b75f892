"""No page cites a file that is not there: links, and paths that are written out."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "kernels", "nwor_bench", "requirements", "scenarios", "sweeps", "tests")
PAGES = sorted(
    [*CHECKOUT.glob("*.md")]
    + [page for name in FOLDERS for page in (CHECKOUT / name).rglob("*.md")]
    + [*(CHECKOUT / "sweeps").rglob("*.py"), *(CHECKOUT / "sweeps").glob("*.toml")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
WRITTEN = re.compile(
    rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*"
    r"\.(?:py|md|csv|json|jsonl|toml|txt|yml)(?:\.gz)?)"
)
HISTORY = {"CHANGELOG.md"}
"""Pages that name files of older versions too; their links must lead somewhere all the same."""


def missing(page: Path, text: str, checkout: Path) -> Iterator[str]:
    """What the page cites and is not there."""
    if page.suffix == ".md":
        for target in LINK.findall(text):
            path = target.partition("#")[0]
            if "://" not in target and path and not (page.parent / path).exists():
                yield target
    if page.name not in HISTORY:
        yield from (path for path in WRITTEN.findall(text) if not (checkout / path).exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_what_a_page_cites_is_there(page: Path) -> None:
    assert list(missing(page, page.read_text(encoding="utf-8"), CHECKOUT)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see [it](gone.md)", ["gone.md"]),
        ("see [it](../there.md#part) and [that](https://example.com/gone.md), [here](#part)", []),
        ("run `tests/gone.py`", ["tests/gone.py"]),
        ("    python sweeps/gone.py --output DIR", ["sweeps/gone.py"]),
        ("    python sweeps/there.py docs/gone.csv.gz", ["docs/gone.csv.gz"]),
        ("run `sweeps/there.py` into /tmp/tests/gone.csv or `sweeps/*.toml`", []),
    ],
)
def test_a_missing_file_is_seen(tmp_path: Path, text: str, found: list[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "sweeps").mkdir()
    for name in ("there.md", "sweeps/there.py"):
        (tmp_path / name).touch()
    assert list(missing(tmp_path / "docs" / "page.md", text, tmp_path)) == found
