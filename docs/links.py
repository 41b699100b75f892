"""mkdocs hook: README.md is the first page; links out of docs/ lead to the repository."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
CHECKOUT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def github_slug(heading: str, _separator: str) -> str:
    """A heading's anchor as GitHub makes it, because the pages are read there too."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def on_config(config: MkDocsConfig) -> None:
    """Make anchors as GitHub does."""
    config.mdx_configs["toc"] = {"slugify": github_slug}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Make README.md the first page."""
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text))


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead each link to a page of the site if there is one, otherwise to the file's place."""
    folder = CHECKOUT if page.file.src_uri == "index.md" else DOCS
    root = f"{config.repo_url}/blob/HEAD" if config.repo_url else CHECKOUT.as_uri()

    def led(match: re.Match[str]) -> str:
        file = Path(os.path.normpath(folder / match[1]))
        if not file.exists():
            raise PluginError(f"{page.file.src_uri}: no file {match[1]}")
        if file == CHECKOUT / "README.md":
            return "index.md"
        if file.is_relative_to(DOCS):
            return file.relative_to(DOCS).as_posix()
        return f"{root}/{file.relative_to(CHECKOUT).as_posix()}"

    return LINK.sub(led, text)
