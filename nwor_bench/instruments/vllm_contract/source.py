"""Find names in vLLM's source files, which are parsed and never imported.

vLLM's modules take seconds to import, and some need a GPU.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from nwor_bench.instruments.vllm_contract.definition import (
    ATTRIBUTE,
    Definition,
    definition_of,
    fields_of,
)

MOST_HOPS = 8
"""Imports and base classes followed for one name; a longer chain is a circle."""

ALL_FIELDS = "*"
"""In a member's place: all fields of the class."""


class VllmSource:
    """The source files of one vLLM.

    Args:
        root: the folder that holds the package `vllm`.
    """

    def __init__(self, root: Path):
        self._root = root
        self._modules: dict[str, _Module | None] = {}

    def read(self, name: str) -> Definition | None:
        """The definition of `module:name` or `module:Class.member`; None: there is none.

        `module:Class.*` is all of a class's own fields. Imports are followed to where a name is
        defined, and members are looked for in base classes too.
        """
        module, _, path = name.partition(":")
        head, _, member = path.partition(".")
        found = self._find(module, head, MOST_HOPS)
        if found is None:
            return None
        where, statement = found
        if member:
            return self._member(where, statement, member, MOST_HOPS)
        return definition_of(statement, where.lines)

    def _find(self, module: str, name: str, hops: int) -> "tuple[_Module, ast.stmt] | None":
        """The statement that defines a module's name, and the module in which it stands."""
        source = self._module(module)
        if source is None or not hops:
            return None
        if name in source.statements:
            return source, source.statements[name]
        imported = source.imports.get(name)
        return None if imported is None else self._find(*imported, hops - 1)

    def _member(
        self, module: "_Module", owner: ast.stmt, member: str, hops: int
    ) -> Definition | None:
        if not isinstance(owner, ast.ClassDef) or not hops:
            return None
        own = _own_member(owner, member, module.lines)
        if own is not None:
            return own
        for base in owner.bases:
            parent = self._find(module.name, ast.unparse(base).partition("[")[0], hops)
            found = None if parent is None else self._member(*parent, member, hops - 1)
            if found is not None:
                return found
        return None

    def _module(self, name: str) -> "_Module | None":
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            files = (path.with_suffix(".py"), path / "__init__.py")
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = None if file is None else _Module(name, file)
        return self._modules[name]


class _Module:
    """One parsed source file."""

    def __init__(self, name: str, file: Path):
        text = file.read_text(encoding="utf-8")
        self.name = name
        self.lines = text.splitlines(keepends=True)
        self._package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
        self._body = ast.parse(text).body

    @cached_property
    def statements(self) -> dict[str, ast.stmt]:
        """Functions, classes and variables of the module; the first definition of each name."""
        found: dict[str, ast.stmt] = {}
        for statement in _flat(self._body):
            for name in _names(statement):
                found.setdefault(name, statement)
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Imported names, each with its module and its name there."""
        return {
            alias.asname or alias.name: (self._absolute(statement), alias.name)
            for statement in _flat(self._body)
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }

    def _absolute(self, statement: ast.ImportFrom) -> str:
        above = self._package[: len(self._package) + 1 - statement.level]
        package = above if statement.level else []
        return ".".join([*package, *filter(None, [statement.module])])


def _own_member(owner: ast.ClassDef, name: str, lines: list[str]) -> Definition | None:
    """A class's own method or field, or an attribute that one of its methods sets."""
    if name == ALL_FIELDS:
        return fields_of(owner, lines)
    for statement in _flat(owner.body):
        if name in _names(statement):
            return definition_of(statement, lines)
    for node in ast.walk(owner):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if node.attr == name and ast.unparse(node.value) == "self":
            return ATTRIBUTE
    return None


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, with those inside of its `if` and `try` statements."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from _flat([*statement.body, *statement.orelse])
        else:
            yield statement


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign):
        return [ast.unparse(statement.target)]
    if isinstance(statement, ast.Assign):
        return [ast.unparse(target) for target in statement.targets]
    return []
