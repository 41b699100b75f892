"""`make test-fast` leaves marked tests out, and still has tests of every package."""

import ast
import re
from itertools import islice
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in (CHECKOUT / "nwor_bench").glob("*/__init__.py"))
LEFT_OUT = re.compile(r"pytest\.mark\.(engine|gpu|slow|long)\b")


def fast_tests(path: Path) -> list[str]:
    """Names of a file's test functions that neither it nor they themselves leave out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        of_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        if of_all and LEFT_OUT.search(ast.unparse(node)):
            return []
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(LEFT_OUT.match(ast.unparse(mark)) for mark in node.decorator_list)
    ]


@pytest.mark.parametrize("package", [*PACKAGES, "kernels", "project", "studies"])
def test_test_fast_has_tests_of_every_package(package: str) -> None:
    files = (CHECKOUT / "tests" / package).rglob("test_*.py")
    found = (name for path in files for name in fast_tests(path))
    assert len(list(islice(found, 5))) == 5


def test_marked_tests_are_seen(tmp_path: Path) -> None:
    source = "@pytest.mark.slow  # a process\ndef test_a(): pass\n\ndef test_b(): pass\n"
    path = tmp_path / "test_it.py"
    path.write_text(source)
    assert fast_tests(path) == ["test_b"]
    path.write_text(f"pytestmark = [pytest.mark.engine]\n{source}")
    assert fast_tests(path) == []
