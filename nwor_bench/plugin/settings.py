"""The plugin's switches: three environment variables, read once per process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from nwor_bench.errors import ConfigError
from nwor_bench.records import NworMode, ScvMode

NWOR_MODE = "VLLM_NWOR_MODE"
SCV_MODE = "VLLM_SCV_MODE"
DEBUG = "VLLM_NWOR_DEBUG"

Mode = TypeVar("Mode", NworMode, ScvMode)


@dataclass(frozen=True)
class PluginSettings:
    """What the environment asks of the plugin."""

    nwor_mode: NworMode
    scv_mode: ScvMode
    debug: bool


def read_settings(environ: Mapping[str, str] = os.environ) -> PluginSettings | None:
    """The settings, or None when neither mode variable is set: then vLLM stays untouched.

    Raises:
        ConfigError: a variable holds an unknown mode.
    """
    if not environ.get(NWOR_MODE) and not environ.get(SCV_MODE):
        return None
    return PluginSettings(
        nwor_mode=_mode(environ, NWOR_MODE, NworMode),
        scv_mode=_mode(environ, SCV_MODE, ScvMode),
        debug=environ.get(DEBUG, "0") not in ("", "0"),
    )


def _mode(environ: Mapping[str, str], name: str, modes: type[Mode]) -> Mode:
    value = environ.get(name) or "off"
    if value not in list(modes):
        raise ConfigError.unknown(name, value, [str(mode) for mode in modes])
    return modes(value)
