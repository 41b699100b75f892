"""Loads a study's scripts as they run: with their own folder alone on the path."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

STUDIES = Path(__file__).resolve().parents[2] / "sweeps" / "studies"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """`study("dram-bytes", "page")` is that folder's page.py.

    Several studies have a page.py: a study's modules are forgotten before another's are loaded.
    """

    def load(folder: str, name: str) -> ModuleType:
        path = STUDIES / folder
        if str(path) != sys.path[0]:
            forget()
            monkeypatch.syspath_prepend(str(path))
        return importlib.import_module(name)

    yield load
    forget()


def forget() -> None:
    """Drop all modules of studies."""
    folder = f"{STUDIES}/"
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.startswith(folder):
            del sys.modules[name]
