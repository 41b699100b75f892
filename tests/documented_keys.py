"""The keys that docs/json.md lists, and whether a document has them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]


@cache
def documented() -> dict[str, tuple[str, ...]]:
    """Keys by the heading of their section: its `Keys:` paragraph and its table's first column."""
    text = (CHECKOUT / "docs/json.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {section.splitlines()[0]: tuple(keys_of(section)) for section in sections}


def keys_of(section: str) -> Iterator[str]:
    flags = re.MULTILINE | re.DOTALL
    for part in re.findall(r"^(?:Keys:.*?(?:\n\n|\Z)|\| `.*? \|)", section, flags):
        yield from re.findall(r"`([^`]+)`", part)


def lacking(content: Any, section: str) -> list[str]:
    """Documented keys that a document does not have."""
    return [key for key in documented()[section] if not any(True for _ in at(content, key))]


def at(content: Any, key: str) -> Iterator[Any]:
    """What stands at `a[].b`, in every entry of a."""
    name, _, rest = key.partition(".")
    if name.removesuffix("[]") not in content:
        return
    found = content[name.removesuffix("[]")]
    for each in found if name.endswith("[]") else [found]:
        yield from at(each, rest) if rest else [each]


def top_level(section: str) -> set[str]:
    return {re.split(r"[.\[]", key)[0] for key in documented()[section]}
