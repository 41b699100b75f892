"""The plugin's switches: environment variables, read once per process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import NworMode, ScvMode, StageBy, StageL2

NWOR_MODE = "VLLM_NWOR_MODE"
SCV_MODE = "VLLM_SCV_MODE"
STAGE_BY = "VLLM_NWOR_STAGE_BY"
STAGE_L2 = "VLLM_NWOR_STAGE_L2"
DEBUG = "VLLM_NWOR_DEBUG"

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True)
class PluginSettings:
    """What the environment variables choose."""

    nwor_mode: NworMode
    scv_mode: ScvMode
    debug: bool
    stage_by: StageBy = StageBy.REFERENCE
    stage_l2: StageL2 = StageL2.NORMAL

    @property
    def needs_gpu(self) -> str | None:
        """The variable whose value needs a GPU; None if none does."""
        chosen = {
            STAGE_BY: self.stage_by is not StageBy.REFERENCE,
            STAGE_L2: self.stage_l2 is not StageL2.NORMAL,
        }
        return next((name for name, holds in chosen.items() if holds), None)


def read_settings(environ: Mapping[str, str] = os.environ) -> PluginSettings | None:
    """The settings, or None when neither mode variable is set: then vLLM stays untouched.

    Raises:
        ConfigError: a variable has an unknown value, or one that needs another variable.
    """
    if not environ.get(NWOR_MODE) and not environ.get(SCV_MODE):
        return None
    settings = PluginSettings(
        nwor_mode=_choice(environ, NWOR_MODE, NworMode.OFF),
        scv_mode=_choice(environ, SCV_MODE, ScvMode.OFF),
        debug=environ.get(DEBUG, "0") not in ("", "0"),
        stage_by=_choice(environ, STAGE_BY, StageBy.REFERENCE),
        stage_l2=_choice(environ, STAGE_L2, StageL2.NORMAL),
    )
    if settings.stage_l2 is StageL2.PERSIST and settings.stage_by is not StageBy.COPY:
        raise ConfigError.for_field(
            STAGE_L2, settings.stage_l2, f"it keeps copies in L2; set {STAGE_BY}=copy too"
        )
    return settings


def _choice(environ: Mapping[str, str], name: str, default: Choice) -> Choice:
    kind = type(default)
    value = environ.get(name) or default
    if value not in list(kind):
        raise ConfigError.unknown(name, value, [str(word) for word in kind])
    return kind(value)
