"""Signature and digest of a definition in a source file.

A digest leaves out comments, docstrings, annotations of parameters and line breaks, and does not
depend on the Python that reads the file.
"""

import ast
import hashlib
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import NamedTuple

DIGEST_LENGTH = 12
"""Hexadecimal digits kept of a body's SHA-256."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """What is known of one name."""

    signature: str
    """A function's parameters with their defaults; else "class", "fields", "attribute", "value"."""
    digest: str
    """Of a function's decorators and body, of fields, or of a value; "" where presence is all."""


CLASS = Definition("class", "")
"""A class: its members are names of their own."""

ATTRIBUTE = Definition("attribute", "")
"""An attribute that a method sets."""


def definition_of(statement: ast.stmt, lines: Sequence[str]) -> Definition:
    """A function, a class or a variable, in the file that has these lines."""
    if isinstance(statement, Function):
        parts: list[ast.stmt | ast.expr] = [
            *statement.decorator_list,
            *_without_docstring(statement),
        ]
        return Definition(_signature(statement.args), _digest(parts, lines))
    if isinstance(statement, ast.ClassDef):
        return CLASS
    return Definition("value", _digest([statement], lines))


def fields_of(owner: ast.ClassDef, lines: Sequence[str]) -> Definition:
    """All fields of a dataclass, or all members of an enumeration."""
    fields = [s for s in owner.body if isinstance(s, ast.Assign | ast.AnnAssign)]
    return Definition("fields", _digest(fields, lines))


def _signature(arguments: ast.arguments) -> str:
    bare = deepcopy(arguments)
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(bare)})"


def _without_docstring(function: Function) -> list[ast.stmt]:
    first, *rest = function.body
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return rest if is_docstring else function.body


def _digest(parts: Iterable[ast.stmt | ast.expr], lines: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for text in _tokens(lines[part.lineno - 1 : part.end_lineno]):
            digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:DIGEST_LENGTH]


def _tokens(lines: Sequence[str]) -> Iterator[str]:
    """Tokens of whole lines, without comments and line breaks inside of a statement.

    From Python 3.12 on an f-string is many tokens, before it is one: here it is one.
    """
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
    f_start = getattr(tokenize, "FSTRING_START", None)
    f_end = getattr(tokenize, "FSTRING_END", None)
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
        if token.type == f_start:
            depth, start = depth + 1, start if depth else token.start
        elif token.type == f_end:
            depth -= 1
            if not depth:
                yield _between(lines, start, token.end)
        elif not depth and token.type not in skipped:
            in_words = {tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>"}
            yield in_words.get(token.type, token.string.strip("\r\n") or "<line>")


def _between(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one (row from 1, column) to another."""
    rows = list(lines[start[0] - 1 : end[0]])
    rows[-1] = rows[-1][: end[1]]
    rows[0] = rows[0][start[1] :]
    return "".join(rows)
