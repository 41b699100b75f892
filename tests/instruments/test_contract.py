"""The contract with vLLM: each entry changed once takes the right features, and says why."""

import ast
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest
from contracted_vllm import SURPRISE, ContractedVllm, Name, every_name, features_of

from nwor_bench.instruments import contract
from nwor_bench.instruments.contract import CONTRACT, Feature, Need, Source, losses, problem

NAMES = every_name()


def in_short(name: Name) -> str:
    return name[1]


def test_a_vllm_with_all_that_is_needed_takes_nothing() -> None:
    assert losses(ContractedVllm()) == {}


def test_a_wheel_is_read_as_a_folder_is(tmp_path: Path) -> None:
    """With what a class inherits, imports under a condition, and sets in its methods."""
    sources = {
        "vllm/base.py": "class Base:\n    def wrapped(self, given): pass\n",
        "vllm/runner/own.py": "from .. import base\nfrom ..base import Base as Kind\n",
        "vllm/runner/__init__.py": "from .own import Kind\n"
        "if cuda:\n    from vllm.base import Base\n"
        "class Runner(Kind):\n    def __init__(self):\n        self.device = self.b = None\n",
    }
    wheel = tmp_path / "vllm-1.whl"
    with ZipFile(wheel, "w") as file:
        for path, text in sources.items():
            file.writestr(path, text)
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    for source in (Source(ZipPath(wheel, "vllm/")), Source(tmp_path / "vllm")):
        wrapped = "runner:Runner.wrapped"
        assert problem(source, Need(wrapped, "takes", ("given", "[more]"))) is None
        assert problem(source, Need(wrapped, "calls", ("given",))) is None
        assert problem(source, Need("runner:Runner", "has", ("device", "b"))) is None
        assert problem(source, Need("runner", "has", ("Base", "Kind"))) is None
        for need, reason in (
            (Need(wrapped, "takes", ("given", "more")), "- more"),
            (Need(wrapped, "takes", ("other", "*")), "- other, + given"),
            (Need(wrapped, "calls", ("given", "more=")), "- more"),
            (Need(wrapped, "calls", ()), "+ given"),
        ):
            assert problem(source, need) == f"Runner.wrapped has other arguments: {reason}"
        assert problem(source, Need("nowhere:Runner", "has", ())) == "Runner is gone"


@pytest.mark.parametrize(
    ("gone", "line", "code"),
    [
        ("post_update", "joined update     no (post_update is gone)", 0),
        ("InputBuffers", "staging           no (InputBuffers is gone)", 1),
        ("InputBuffers", "one state slot    no\n", 1),
    ],
)
def test_a_version_without_staging_fails_a_job(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gone: str,
    line: str,
    code: int,
) -> None:
    def download(command: list[str], check: bool) -> CompletedProcess[str]:
        with ZipFile(Path(command[-1]) / "vllm-0.34.0-any.whl", "w") as file:
            file.writestr("vllm/__init__.py", "")
        return CompletedProcess(command, 0)

    vllm = ContractedVllm(without=("v1.worker.gpu.input_batch", gone))
    monkeypatch.setattr("subprocess.run", download)
    monkeypatch.setattr(contract, "Source", lambda wheel: vllm)
    assert contract.main("0.34.0") == code
    said = capsys.readouterr().out
    assert said.startswith("vLLM 0.34.0, by its source:\n  windows           yes\n")
    assert line in said


def test_a_version_that_pip_does_not_find_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.run", lambda command, check: CompletedProcess(command, 1))
    assert contract.main("0.99") == 2
    assert "VLLM: '0.99' is invalid; write" in capsys.readouterr().err


@pytest.mark.slow  # parses 40 files
def test_the_installed_one_takes_nothing() -> None:
    site = find_spec("vllm")
    if site is None or not site.submodule_search_locations:
        pytest.skip("vLLM is not here")
    assert losses(Source(Path(site.submodule_search_locations[0]))) == {}


def test_the_fields_that_are_known_are_those_of_the_installed_one() -> None:
    source = contract.vllm_source()
    if source is None:
        pytest.skip("vLLM is not here")
    where = "v1.attention.backends.gdn_attn:GDNAttentionMetadata"
    assert source.fields(where) - CONTRACT[Feature.STATES].known[where] == frozenset()
    [operator] = [each for each in CONTRACT[Feature.STATES].known if each.endswith("_spec_cpu")]
    found = source.find(operator)
    assert found is not None
    assert isinstance(found.node, ast.FunctionDef)
    names = {argument.arg for argument in found.node.args.args}
    assert (
        names - {"softplus_beta", "softplus_threshold"} == CONTRACT[Feature.STATES].known[operator]
    )


@pytest.mark.parametrize("name", NAMES, ids=in_short)
def test_what_is_renamed_takes_the_features_that_need_it(name: Name) -> None:
    found = losses(ContractedVllm(without=name))
    assert set(found) == features_of(name)
    last = name[1].removeprefix("texts.").rpartition(".")[2]
    assert all(last in reason for reason in found.values())


@pytest.mark.parametrize(
    "name", [name for name, parameters in NAMES.items() if parameters], ids=in_short
)
def test_another_signature_takes_the_features_that_rely_on_it(name: Name) -> None:
    found = losses(ContractedVllm(other=name))
    assert set(found) == features_of(name, form=True)
    for reason in found.values():
        assert reason.startswith(f"{name[1]} has other arguments: ")
        assert f"+ {SURPRISE}" in reason
