"""The plugin's switches: environment variables, read once per process."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from nwor_bench.errors import ConfigError
from nwor_bench.records.types import AttentionBy, BesidePrefill, NworMode, ScvMode, StageBy

NWOR_MODE = "VLLM_NWOR_MODE"
SCV_MODE = "VLLM_SCV_MODE"
STAGE_BY = "VLLM_NWOR_STAGE_BY"
BESIDE_PREFILL = "VLLM_NWOR_BESIDE_PREFILL"
DRAFTS = "VLLM_NWOR_DRAFTS"
CPU_ATTENTION = "VLLM_NWOR_CPU_ATTENTION"
"""`stock`: a CPU keeps vLLM's own attention, and nothing can be staged."""

ATTENTION = "VLLM_NWOR_ATTENTION"
DEBUG = "VLLM_NWOR_DEBUG"

INTERLEAVE = "interleave"
"""Value of VLLM_NWOR_MODE: off and stage are interleaved (see `interleaving`); and of
VLLM_NWOR_DRAFTS: draft counts are (see `draft_patches`)."""

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True)
class PluginSettings:
    """Values of the environment variables."""

    nwor_mode: NworMode
    scv_mode: ScvMode
    debug: bool
    stage_by: StageBy = StageBy.REFERENCE
    beside_prefill: BesidePrefill = BesidePrefill.DIRECT
    attention: AttentionBy = AttentionBy.AUTO
    interleave: bool = False
    """Off x off and `nwor_mode` x `scv_mode` are interleaved."""
    drafts: bool = False
    """Draft counts are interleaved, in off x off."""

    @property
    def mode_name(self) -> str:
        """The value of VLLM_NWOR_MODE, as the metrics' label `nwor_mode`."""
        return INTERLEAVE if self.interleave else str(self.nwor_mode)

    @property
    def needs_gpu(self) -> str | None:
        """The variable whose value needs a GPU; None if none does."""
        return None if self.stage_by is StageBy.REFERENCE else STAGE_BY


def read_settings(environ: Mapping[str, str] = os.environ) -> PluginSettings | None:
    """The settings, or None when none of the first three is set: then vLLM stays untouched.

    Raises:
        ConfigError: a variable has an unknown value, or two do not go together.
    """
    if not any(map(environ.get, (NWOR_MODE, SCV_MODE, DRAFTS))):
        return None
    if environ.get(DRAFTS):
        _check_drafts(environ)
    interleave = environ.get(NWOR_MODE) == INTERLEAVE
    # Validation on the host would wait for the device in each window.
    scv_mode = ScvMode.ADAPTIVE if interleave else ScvMode.OFF
    return PluginSettings(
        nwor_mode=NworMode.STAGE
        if interleave
        else _choice(environ, NWOR_MODE, NworMode.OFF, also=(INTERLEAVE,)),
        scv_mode=_choice(environ, SCV_MODE, scv_mode),
        debug=environ.get(DEBUG, "0") not in ("", "0"),
        stage_by=_choice(environ, STAGE_BY, StageBy.REFERENCE),
        beside_prefill=_choice(environ, BESIDE_PREFILL, BesidePrefill.DIRECT),
        attention=_choice(environ, ATTENTION, AttentionBy.AUTO),
        interleave=interleave,
        drafts=bool(environ.get(DRAFTS)),
    )


def _check_drafts(environ: Mapping[str, str]) -> None:
    """Draft counts are compared with NWOR off."""
    if environ[DRAFTS] != INTERLEAVE:
        raise ConfigError.unknown(DRAFTS, environ[DRAFTS], [INTERLEAVE])
    for name in (NWOR_MODE, SCV_MODE):
        value = environ.get(name) or "off"
        if value != "off":
            remedy = f"draft counts are compared in off x off; unset it, or unset {DRAFTS}"
            raise ConfigError.for_field(name, value, remedy)


def _choice(
    environ: Mapping[str, str], name: str, default: _Choice, also: Sequence[str] = ()
) -> _Choice:
    """The variable's value; `also` are values that a caller has looked for, to be named."""
    kind = type(default)
    value = environ.get(name) or default
    if value not in list(kind):
        raise ConfigError.unknown(name, value, [*map(str, kind), *also])
    return kind(value)
