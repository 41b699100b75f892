"""The contract with vLLM: the installed version keeps it, and it names all that we rest on."""

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import nwor_bench
from nwor_bench.instruments import versions
from nwor_bench.instruments.vllm_contract import Contract, changes, known, nearest, stored
from nwor_bench.instruments.vllm_contract.definition import Definition
from nwor_bench.instruments.vllm_contract.names import NAMES, all_names
from nwor_bench.instruments.vllm_contract.source import VllmSource

PACKAGE = Path(nwor_bench.__file__).parent
OURS = ("hook", "hook.validator", "hook.window", "own", "window")
"""What our own objects are called where they are patched."""


@cache
def resting_on_vllm() -> list[tuple[Path, list[ast.AST]]]:
    """Our files that import or wrap vLLM's names, and their nodes."""
    files = [*(PACKAGE / "plugin").rglob("*.py"), *(PACKAGE / "engine").rglob("*.py")]
    files.append(PACKAGE / "microbench" / "peers.py")
    return [(file, list(ast.walk(ast.parse(file.read_text())))) for file in files]


@pytest.mark.slow  # parses vLLM's largest files
def test_the_installed_version_meets_its_contract() -> None:
    found = versions.contract_changes()
    assert known(found.version), f"python -m nwor_bench.instruments.vllm_contract stores {found}"
    assert found.changed == {}


def test_every_stored_contract_has_every_name() -> None:
    assert len(set(all_names())) == len(all_names())
    for contract in stored().values():
        assert set(contract.names) == set(all_names())
        assert Contract.from_json(contract.to_json()) == contract


def test_each_name_exists_in_some_version() -> None:
    names = set(all_names())
    for contract in stored().values():
        names -= {name for name, definition in contract.names.items() if definition is not None}
    assert names == set()


@pytest.mark.slow
def test_every_import_from_vllm_is_in_the_contract() -> None:
    for file, nodes in resting_on_vllm():
        for node in nodes:
            if isinstance(node, ast.Import):
                assert not any(a.name.partition(".")[0] == "vllm" for a in node.names), file
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                listed = NAMES.get(node.module or "", ())
                assert {a.name for a in node.names} <= set(listed), (file, node.lineno)


@pytest.mark.slow
def test_every_patched_method_is_in_the_contract() -> None:
    members = {name.replace(":", ".").rpartition(".")[2] for name in all_names()}
    members.add("forward")  # a model's own
    patched = 0
    for file, nodes in resting_on_vllm():
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Patch":
                target, name = map(ast.unparse, node.args[:2])
                if target not in OURS:
                    assert ast.literal_eval(name) in members, (file, node.lineno)
                    patched += 1
    assert patched > 20


# Reading definitions


METHOD = """
class Runner(Base):
    rows: int = 4

    @wrapped
    def sample(self, hidden, grammar=None):
        self.drafts = 2
        if hidden:
            self.rows = f"{hidden!r} {{rows}}"
        return pick(hidden, grammar)
"""
SAME = {
    "comments": METHOD.replace("            self", "            # says why\n            self"),
    "docstring": METHOD.replace("=None):\n", '=None):\n        """Sample."""\n'),
    "annotations": METHOD.replace("hidden, grammar=None)", "hidden: Tensor, grammar: Any = None)"),
    "line breaks": METHOD.replace("pick(hidden, grammar)", "pick(\n  hidden, grammar\n)"),
    "place": "import torch\n\n\n" + METHOD,
}
BODY = {
    "value": METHOD.replace("drafts = 2", "drafts = 3"),
    "indentation": METHOD.replace("        return", "            return"),
    "decorator": METHOD.replace("@wrapped", "@torch.inference_mode()"),
    "f-string": METHOD.replace("{{rows}}", "{{row}}"),
}
SIGNATURE = {
    "default": METHOD.replace("grammar=None", "grammar=0"),
    "argument": METHOD.replace("grammar=None", "grammar=None, *, offset=0"),
}


def read(folder: Path, name: str, **modules: str) -> Definition | None:
    package = folder / "vllm"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(modules.pop("init", ""))
    for module, text in modules.items():
        (package / f"{module}.py").write_text(text)
    return VllmSource(folder).read(name)


def sample(folder: Path, text: str) -> Definition:
    found = read(folder, "vllm.runner:Runner.sample", runner=text)
    assert found is not None
    return found


@pytest.mark.parametrize("how", SAME)
def test_what_does_not_matter_leaves_the_definition(tmp_path: Path, how: str) -> None:
    assert sample(tmp_path, SAME[how]) == sample(tmp_path, METHOD)


@pytest.mark.parametrize("how", [*BODY, *SIGNATURE])
def test_what_matters_changes_it(tmp_path: Path, how: str) -> None:
    before = sample(tmp_path, METHOD)
    after = sample(tmp_path, {**BODY, **SIGNATURE}[how])
    assert (after.signature != before.signature) is (how in SIGNATURE)
    assert (after.digest != before.digest) is (how in BODY)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("vllm.runner:Runner", "class"),
        ("vllm.runner:Runner.sample", "(self, hidden, grammar=None)"),
        ("vllm.runner:Runner.rows", "value"),
        ("vllm.runner:Runner.drafts", "attribute"),
        ("vllm.runner:Runner.*", "fields"),
        ("vllm.runner:Runner.inherited", "(self)"),
        ("vllm:Runner.sample", "(self, hidden, grammar=None)"),
        ("vllm.runner:CONSTANT", "value"),
        ("vllm.base:lazily", "(name)"),
        ("vllm.runner:Runner.missing", None),
        ("vllm.runner:Missing", None),
        ("vllm.missing:Runner", None),
        ("vllm:again", None),
    ],
)
def test_names_are_found_where_they_are_defined(
    tmp_path: Path, name: str, signature: str | None
) -> None:
    found = read(
        tmp_path,
        name,
        init="from typing import TYPE_CHECKING\nfrom vllm import again\n"
        "if TYPE_CHECKING:\n    from .runner import Runner\n",
        runner=f"from vllm.base import Base\nCONSTANT = 3\n{METHOD}",
        base="try:\n    def lazily(name): ...\nexcept ImportError:\n    lazily = None\n\n"
        "class Base:\n    def inherited(self): ...\n",
    )
    assert (None if found is None else found.signature) == signature


# Comparing versions


OLD = Contract(
    "0.33.0",
    {
        "vllm.a:Runner.sample": Definition("(self)", "1"),
        "vllm.a:Runner.gone": Definition("(self)", "2"),
        "vllm.a:Runner.new": None,
        "vllm.a:Runner.body": Definition("(self)", "3"),
        "vllm.a:Runner.kept": Definition("(self)", "4"),
        "vllm.a:Runner.never": None,
    },
)
CHANGED = {
    "vllm.a:Runner.sample": Definition("(self, step)", "1"),
    "vllm.a:Runner.gone": None,
    "vllm.a:Runner.new": Definition("value", "5"),
    "vllm.a:Runner.body": Definition("(self)", "6"),
}


def test_a_change_is_one_line_with_what_breaks_first() -> None:
    found = changes(replace(OLD, version="0.34.0", names={**OLD.names, **CHANGED}), OLD)
    assert str(found) == (
        "vLLM 0.34.0: 2 of 6 names as in 0.33.0; changed: Runner.gone (gone), "
        "Runner.sample (signature), Runner.body (body), Runner.new (new)"
    )


def test_no_change_and_many_changes_are_one_line() -> None:
    assert str(changes(OLD, OLD)) == "vLLM 0.33.0: 6 of 6 names as in 0.33.0"
    every = {f"vllm.a:f{n}": Definition("()", "") for n in range(10)}
    gone = Contract("0.34.0", dict.fromkeys(every))
    assert str(changes(gone, Contract("0.33.0", every))).endswith("f5 (gone) and 4 more")


@pytest.mark.parametrize(
    ("version", "is_known", "base"),
    [
        ("0.31.0", True, "0.31.0"),
        ("0.32.0+cu130", True, "0.32.0"),
        ("0.32.1", False, "0.32.0"),
        ("0.33.0rc1", False, "0.33.0"),
        ("0.33.1.dev2+gabc", False, "0.33.0"),
        ("1.0", False, "0.33.0"),
        ("0.30.0", False, "0.31.0"),
    ],
)
def test_versions_are_compared_with_the_newest_that_is_not_newer(
    version: str, is_known: bool, base: str
) -> None:
    assert known(version) is is_known
    assert nearest(version).version == base
