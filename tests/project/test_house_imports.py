"""Who may import whom: packages by floor, read off the folders; a few rules for single modules.

Imports are read from the source with `ast`, so nothing is imported to check them."""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {"nwor_bench": Path("nwor_bench"), "nwor_kernels": Path("kernels/nwor_kernels")}

FLOORS = (
    ("errors", "stats"),
    ("records",),
    ("workload", "instruments"),
    ("models",),
    ("analysis",),
    ("engine", "report", "plugin"),
    ("live", "run"),
    ("cli",),
    ("__main__",),
)
"""The packages from the ground up. A package imports from the floors below it, never from its own
floor or from above."""

HEAVY = "torch vllm pandas scipy pydantic transformers matplotlib"
NO_ENGINE = "nwor_bench.stats nwor_bench.records nwor_bench.workload nwor_bench.models "
NO_ENGINE += "nwor_bench.analysis"


@dataclass(frozen=True)
class Rule:
    """Names are patterns that cover submodules too; `who` less `but` are the modules it binds.

    `never` must not be imported anywhere in the file, inside functions included. `never_loaded`
    must not be loaded by importing the module, through whatever modules of ours it imports.
    `only` are all that may be imported besides the standard library, `only_ours` all of ours.
    """

    name: str
    who: str
    but: str = ""
    never: str = ""
    never_loaded: str = ""
    only: str | None = None
    only_ours: str | None = None


V1, V2 = "nwor_bench.plugin.runner_v1", "nwor_bench.plugin.runner_v2"
RULES = [
    Rule("kernels need torch and triton", "nwor_kernels", only="nwor_kernels torch triton"),
    Rule(
        "references need torch alone", "nwor_kernels.*.reference",
        never="nwor_kernels.*.kernel", only="nwor_kernels torch",
    ),
    Rule("pure packages load no engine", NO_ENGINE, never_loaded="torch vllm"),
    Rule("stats are pure", "nwor_bench.stats", only="nwor_bench.stats numpy scipy"),
    Rule(
        "vllm stays in engine and plugin", "nwor_bench nwor_kernels",
        but="nwor_bench.engine nwor_bench.plugin nwor_bench.run.microbench.contenders",
        never="vllm",
    ),
    Rule(
        "plugin is named by string", "nwor_bench",
        but="nwor_bench.plugin", never="nwor_bench.plugin",
    ),
    Rule(
        "plugin stands by itself", "nwor_bench.plugin",
        only_ours="nwor_bench.errors nwor_bench.instruments nwor_bench.models.support "
        "nwor_bench.plugin nwor_bench.records nwor_bench.stats nwor_kernels",
    ),
    Rule("window knows no vllm", "nwor_bench.plugin.window", never="vllm", never_loaded="vllm"),
    Rule("runner_v1 without runner_v2", V1, never=V2, never_loaded=V2),
    Rule("runner_v2 without runner_v1", V2, never=f"{V1}.hook", never_loaded=f"{V1}.hook"),
    Rule(
        "report sees records, instruments, models and analysis", "nwor_bench.report",
        only_ours="nwor_bench.analysis nwor_bench.errors nwor_bench.instruments nwor_bench.models "
        "nwor_bench.records nwor_bench.report nwor_bench.stats",
        never_loaded="torch",
    ),
    Rule("nvtx waits until it is wanted", "nwor_bench", never_loaded="nvtx"),
    Rule(
        "help answers at once", "nwor_bench.cli.app nwor_bench.cli.commands", never_loaded=HEAVY
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module; `on_load` when importing the file runs it."""

    name: str
    line: int
    on_load: bool


def covers(patterns: str, name: str) -> bool:
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns.split())


def find_modules(checkout: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module of both packages."""
    modules = {}
    for package, folder in SOURCE_ROOTS.items():
        for path in sorted((checkout / folder).rglob("*.py")):
            parts = path.relative_to(checkout / folder).with_suffix("").parts
            modules[".".join([package, *parts]).removesuffix(".__init__")] = path
    return modules


def names_imported(node: ast.stmt, module: str, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that one import statement names, relative ones made absolute."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = node.module or ""
        if node.level:
            package = module.split(".")
            drop = node.level - (modules[module].name == "__init__.py")
            source = ".".join([*package[: len(package) - drop], *filter(None, [source])])
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            yield submodule if submodule in modules else source


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


BODIES = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields that hold statements; an expression imports nothing."""


def read_imports(module: str, modules: dict[str, Path]) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, on_load: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = names_imported(node, module, modules)
            found.extend(Import(name, node.lineno, on_load) for name in names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            on_load = False
        for field in BODIES:
            skipped = is_for_types_only(node) and field == "body"
            for child in getattr(node, field, ()):
                visit(child, on_load and not skipped)

    visit(ast.parse(modules[module].read_text()), True)
    return found


def loaded_by(module: str, imports: dict[str, list[Import]]) -> dict[str, str]:
    """Everything that importing `module` loads -> the chain of modules that leads there."""
    chains = {module: module}
    queue = [module]
    while queue:
        current = queue.pop(0)
        direct = [found.name for found in imports.get(current, []) if found.on_load]
        for name in [*direct, current.rpartition(".")[0]]:  # a package is loaded before its parts
            if name and name not in chains:
                chains[name] = f"{chains[current]} -> {name}"
                queue.append(name)
    return chains


@cache
def read_sources(checkout: Path) -> tuple[dict[str, Path], dict[str, list[Import]]]:
    """All modules under `checkout` and what each imports, read once for all rules."""
    modules = find_modules(checkout)
    return modules, {module: read_imports(module, modules) for module in modules}


def broken(rule: Rule, checkout: Path) -> list[str]:
    """One line for each import under `checkout` that the rule forbids."""
    modules, imports = read_sources(checkout)
    ours = " ".join(SOURCE_ROOTS)
    lines = []
    for module in modules:
        if not covers(rule.who, module) or covers(rule.but, module):
            continue
        for found in imports[module]:
            name = found.name
            standard = name.partition(".")[0] in sys.stdlib_module_names
            outside = rule.only is not None and not standard and not covers(rule.only, name)
            foreign = (
                rule.only_ours is not None
                and covers(ours, name)
                and not covers(rule.only_ours, name)
            )
            if covers(rule.never, name) or outside or foreign:
                lines.append(f"{modules[module].relative_to(checkout)}:{found.line} imports {name}")
        if rule.never_loaded:
            chains = loaded_by(module, imports)
            lines += [chain for name, chain in chains.items() if covers(rule.never_loaded, name)]
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_sources_keep_the_rule(rule: Rule) -> None:
    assert broken(rule, CHECKOUT) == []


BENCH, KERNELS = "nwor_bench", "kernels/nwor_kernels"
PLANTED: list[tuple[str, dict[str, str]]] = [
    ("kernels need torch and triton", {f"{KERNELS}/stage/kernel.py": "import numpy"}),
    ("references need torch alone", {
        f"{KERNELS}/mask/kernel.py": "",
        f"{KERNELS}/mask/reference.py": "from .kernel import fast",
    }),
    ("pure packages load no engine", {
        f"{BENCH}/records/store.py": "import nwor_bench.a.b",
        f"{BENCH}/a/__init__.py": "import torch",
    }),
    ("plugin is named by string", {
        f"{BENCH}/plugin/__init__.py": "",
        f"{BENCH}/engine/engine.py": "def f():\n    from nwor_bench import plugin",
    }),
    ("plugin stands by itself", {
        f"{BENCH}/analysis/groups.py": "",
        f"{BENCH}/plugin/a.py": "from ..analysis.groups import Group",
    }),
    ("window knows no vllm", {f"{BENCH}/plugin/window.py": "try:\n    import vllm\nfinally: 1"}),
    ("help answers at once", {
        f"{BENCH}/cli/commands/sweep.py": "from nwor_bench.workload.config import Spec",
        f"{BENCH}/workload/config.py": "if True:\n    import pydantic",
    }),
]  # fmt: skip
"""One for each way in which a rule is broken."""


def plant(checkout: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


@pytest.mark.parametrize(("rule_name", "files"), PLANTED)
def test_a_planted_import_is_seen(rule_name: str, files: dict[str, str], tmp_path: Path) -> None:
    plant(tmp_path, files)
    rule = next(rule for rule in RULES if rule.name == rule_name)
    assert broken(rule, tmp_path)


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    files = {
        "nwor_bench/plugin/window.py": "import torch\nimport nwor_bench.records.types",
        "nwor_bench/cli/app.py": "import nwor_bench.errors\n\ndef sweep():\n    import torch",
        "nwor_bench/engine/engine.py": "import vllm\nplugin = 'nwor_bench.plugin.worker.Worker'",
        "nwor_bench/records/store.py": "import typing as t\nif t.TYPE_CHECKING:\n    import torch",
        "kernels/nwor_kernels/stage/kernel.py": "import math\nimport torch\nimport triton.language",
    }
    plant(tmp_path, files)
    assert [line for rule in RULES for line in broken(rule, tmp_path)] == []


def package_of(module: str) -> str:
    """`nwor_bench.run.gate.parity` -> `run`."""
    return module.split(".")[1] if "." in module else ""


def climbing(checkout: Path) -> list[str]:
    """One line for each import that does not lead to a lower floor."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    modules, imports = read_sources(checkout)
    lines = []
    for module in modules:
        own = package_of(module)
        if not module.startswith("nwor_bench.") or own not in floor:
            continue
        for found in imports[module]:
            ours = found.name in modules and found.name.startswith("nwor_bench.")
            other = package_of(found.name) if ours else ""
            if other and other != own and floor.get(other, len(FLOORS)) >= floor[own]:
                lines.append(f"{modules[module].relative_to(checkout)}:{found.line} -> {other}")
    return lines


def test_imports_lead_to_lower_floors(tmp_path: Path) -> None:
    assert climbing(CHECKOUT) == []
    source = "from ..report import b"
    plant(tmp_path, {"nwor_bench/engine/a.py": source, "nwor_bench/report/b.py": ""})
    assert len(climbing(tmp_path)) == 1


def test_every_entry_of_the_package_has_a_floor() -> None:
    entries = {
        path.stem
        for path in (CHECKOUT / "nwor_bench").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    named = [name for names in FLOORS for name in names]
    assert entries - {"__init__"} == set(named)
    assert len(named) <= 15
    assert len(FLOORS) <= 10


def undeclared(checkout: Path, declared: Iterable[str]) -> set[str]:
    """Packages that the sources under `checkout` import and that are not among these."""
    _, imports = read_sources(checkout)
    found = {each.name.partition(".")[0] for every in imports.values() for each in every}
    owners = packages_distributions()
    known = {canonicalize_name(name) for name in declared}
    return {
        name
        for name in found - {*SOURCE_ROOTS, *NOT_OURS_TO_INSTALL, *sys.stdlib_module_names}
        if not known & {canonicalize_name(owner) for owner in owners.get(name, [name])}
    }


NOT_OURS_TO_INSTALL = {"torch", "triton", "flashinfer", "vllm", "ncu_report", "pydantic_core"}
"""Come with vLLM (PyTorch, Triton, FlashInfer), Nsight Compute (`ncu_report`) or pydantic.
"""


@pytest.mark.slow
def test_every_imported_package_is_a_dependency(tmp_path: Path) -> None:
    """So a wheel without its extras has all that a sweep and a report need beside vLLM."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["counters"], *extras["ray"]]
    declared = {Requirement(line).name for line in lines} | {"cupti"}  # not installed on a CPU
    assert undeclared(CHECKOUT, declared) == set()
    plant(tmp_path, {"nwor_bench/run/blocks.py": "def f():\n    from scipy.stats import t"})
    assert undeclared(tmp_path, declared - {"scipy"}) == {"scipy"}
