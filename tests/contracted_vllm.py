"""A vLLM made of the contract's table: all that it names, or all but one thing."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nwor_bench.instruments.contract import CONTRACT, Feature, Need, Source

SURPRISE = "surprise"
"""A parameter that nobody knows."""

Name = tuple[str, str]
"""A module, and what it has: "Class", "Class.method", "function", "texts.vllm:some_counter"."""


def _parameters(need: Need) -> list[str]:
    return [each.strip("[]=") for each in need.names if each != "*"]


def _names_of(need: Need) -> Iterator[tuple[str, list[str] | None]]:
    """What a need names in its module, and the parameters of a function."""
    _, _, path = need.where.partition(":")
    if need.verb in ("takes", "calls"):
        yield path, _parameters(need)
        return
    if path:
        yield path, None
    owner = "texts" if need.verb == "says" else path
    yield from ((f"{owner}.{name}" if owner else name, None) for name in need.names)


@cache
def every_name() -> dict[Name, list[str] | None]:
    """All names of the table, each with its parameters, None if it is no function."""
    found: dict[Name, list[str] | None] = {}
    for need in (need for terms in CONTRACT.values() for need in terms.needs):
        for path, parameters in _names_of(need):
            key = need.where.partition(":")[0], path
            found[key] = found.get(key) if parameters is None else parameters
    return found


def features_of(name: Name, *, form: bool = False) -> set[Feature]:
    """Features that need a name or what is below it, and those that need these first.

    `form`: only those that need its parameters.
    """
    found = {
        feature
        for feature, terms in CONTRACT.items()
        for need in terms.needs
        for path, parameters in _names_of(need)
        if need.where.partition(":")[0] == name[0]
        and (path == name[1] or path.startswith(f"{name[1]}."))
        and not (form and parameters is None)
    }
    while more := {each for each in Feature if CONTRACT[each].after in found} - found:
        found |= more
    return found


class ContractedVllm(Source):
    """Such a vLLM, in memory.

    Args:
        without: what is not there, nor anything below it.
        other: a function that takes SURPRISE first.
    """

    def __init__(self, *, without: Name | None = None, other: Name | None = None):
        super().__init__(Path())
        for changed in filter(None, (without, other)):
            self._trees[changed[0]] = _parsed(changed[0], without, other)

    def tree(self, module: str) -> ast.Module | None:
        return self._trees[module] if module in self._trees else _parsed(module, None, None)


@cache
def _parsed(module: str, without: Name | None, other: Name | None) -> ast.Module | None:
    owners: dict[str, list[str]] = {"": []}
    known = False
    for (home, path), parameters in every_name().items():
        known |= home == module
        if home != module or (without and f"{path}.".startswith(f"{without[1]}.")):
            continue
        owner, _, name = path.rpartition(".")
        body = owners.setdefault(owner, [])
        if owner == "texts":
            body.append(f"text_{len(body)} = {name!r}")
        elif parameters is not None:
            first = ["self"] * bool(owner) + [SURPRISE] * ((module, path) == other)
            body.append(f"def {name}({', '.join([*first, *parameters])}): pass")
        elif name[0].isupper() and not owner:
            owners.setdefault(name, [])
        else:
            body.append(f"{name} = None")
    lines = owners.pop("")
    for owner, body in owners.items():
        lines += [f"class {owner}:", *(f"    {line}" for line in body), "    pass"]
    return ast.parse("\n".join(lines)) if known else None
