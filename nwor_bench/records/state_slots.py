"""The switch of an engine that reserves one state slot a request, and what it cannot go with.

Stock vLLM reserves k + 1 slots of recurrent states a request, one for the state behind each token
of a window. Mode stage writes one state, so an engine that always stages needs one slot, and has a
ring of records for each request. vLLM's own `--additional-config '{"nwor_state_slots": 1}'` asks
for it.
"""

from collections.abc import Mapping
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.records.cell import ADAPTIVE_VERIFICATION, NworMode
from nwor_kernels.limits import RECORD_ROWS

STATE_SLOTS = "nwor_state_slots"
"""Entry of vLLM's additional_config."""

ADDITIONAL = "additional_config"
"""vLLM's argument."""

FIELD = f"{ADDITIONAL}: {STATE_SLOTS}"


def one_slot(additional_config: Any) -> bool:
    """True if this additional_config of vLLM asks for one state slot a request."""
    return isinstance(additional_config, Mapping) and STATE_SLOTS in additional_config


def check_one_slot(config: Any, nwor_mode: str) -> None:
    """Refuse what an engine with one slot cannot run. Raises ConfigError.

    Args:
        config: vLLM's VllmConfig, with the switch.
        nwor_mode: VLLM_NWOR_MODE of the engine.
    """
    value = config.additional_config[STATE_SLOTS]
    if type(value) is not int or value != 1:
        raise ConfigError.for_field(FIELD, value, "write 1, or leave it out")
    if nwor_mode != NworMode.STAGE:
        remedy = f"with one state slot a request every window is staged; write {NworMode.STAGE}"
        raise ConfigError.for_field("VLLM_NWOR_MODE", nwor_mode, remedy)
    speculation, cache = config.speculative_config, config.cache_config
    if speculation is None:
        raise ConfigError.for_field(FIELD, value, "without drafts vLLM has one slot; leave it out")
    if config.num_speculative_tokens >= RECORD_ROWS:
        remedy = f"a ring has room for {RECORD_ROWS - 1}; write that, or leave {STATE_SLOTS} out"
        raise ConfigError.for_field("num_speculative_tokens", config.num_speculative_tokens, remedy)
    for name in ("num_speculative_tokens_per_batch_size", ADAPTIVE_VERIFICATION):
        changing = getattr(speculation, name, None)
        if changing:
            remedy = f"draft counts must not change with {STATE_SLOTS}; leave one of the two out"
            raise ConfigError.for_field(f"speculative_config: {name}", changing, remedy)
    if cache.mamba_cache_mode != "none":
        remedy = (
            f"vLLM then also keeps states of cached prefixes (mamba_cache_mode "
            f"{cache.mamba_cache_mode}), which {STATE_SLOTS} has no slot for; write false"
        )
        raise ConfigError.for_field("enable_prefix_caching", True, remedy)
    if getattr(cache, "use_replayssm", False):
        remedy = f"it reserves one slot itself; leave it or {STATE_SLOTS} out"
        raise ConfigError.for_field("use_replayssm", True, remedy)
