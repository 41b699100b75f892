"""`make test-fast` leaves marked tests out, and still has tests of every package."""

import ast
import re
from itertools import islice
from pathlib import Path

import pytest
from test_house_imports import covers, loaded_by, read_imports, read_sources

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in (CHECKOUT / "nwor_bench").glob("*/__init__.py"))
LEFT_OUT = re.compile(r"pytest\.mark\.(engine|gpu|slow|long)\b")


def is_left_out(tree: ast.Module) -> bool:
    """True if a mark of the whole file keeps it out of `make test-fast`, which then skips it."""
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and LEFT_OUT.search(ast.unparse(node))
        for node in tree.body
    )


def fast_tests(path: Path) -> list[str]:
    """Names of a file's test functions that neither it nor they themselves leave out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if is_left_out(tree):
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


@pytest.mark.slow  # every test is parsed
def test_what_test_fast_collects_imports_neither_vllm_nor_transformers() -> None:
    """Both take seconds in every process; a mark on the file, or an import in the test, avoids it.

    Through whatever modules of the checkout a test file imports.
    """
    modules, imports = read_sources(CHECKOUT)
    files = {path.stem: path for path in (CHECKOUT / "tests").rglob("*.py")}
    known = {**modules, **files}
    imports = {**imports, **{name: read_imports(name, known) for name in files}}
    collected = [
        name
        for name, path in files.items()
        if name.startswith("test_") and path.parent.name != "live_engine"
        if not is_left_out(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(collected) > 100
    chains = [
        chain
        for name in collected
        for loaded, chain in loaded_by(name, imports).items()
        if covers("vllm transformers", loaded)
    ]
    assert chains == []
