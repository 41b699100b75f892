"""Loads a study's scripts as they run: with only their own folder on the path."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

STUDIES = Path(__file__).resolve().parents[2] / "sweeps" / "studies"
sys.path.insert(0, str(STUDIES))  # for tables.py


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """`study("runs", "compact")` is that folder's compact.py.

    Studies have modules of the same name: one study's are forgotten before another's are loaded.
    """
    before = set(sys.modules)

    def load(folder: str, name: str) -> ModuleType:
        path = STUDIES / folder
        if str(path) != sys.path[0]:
            forget(before)
            monkeypatch.syspath_prepend(str(path))
        return importlib.import_module(name)

    yield load
    forget(before)


def forget(before: set[str]) -> None:
    """Drop the modules of studies that are loaded now and were not `before`."""
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(STUDIES):
            del sys.modules[name]
