"""The site of README.md and docs/: every page is in its navigation, and it builds."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[2]


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml: a value from the environment is its text."""


Settings.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])


def pages(navigation: list[dict[str, object]]) -> list[str]:
    """The pages below a part of the navigation."""
    found = []
    for entry in navigation:
        for part in entry.values():
            found += pages(part) if isinstance(part, list) else [str(part)]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.load((CHECKOUT / "mkdocs.yml").read_text(), Settings)
    there = [page.name for page in (CHECKOUT / "docs").glob("*.md")]
    assert sorted(pages(settings["nav"])) == sorted(["index.md", *there]), "mkdocs.yml: nav"


@pytest.mark.slow  # builds all pages
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "speculative" in (tmp_path / "index.html").read_text()
    for page in tmp_path.rglob("*.html"):  # GitHub accepts lists and tables that mkdocs does not
        lines = page.read_text().splitlines()
        assert [line for line in lines if line.startswith(("- ", "| "))] == [], page
