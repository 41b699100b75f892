"""The names of vLLM that the plugin and the engine rest on, as stored for each known version."""

from nwor_bench.instruments.vllm_contract.contract import (
    TRIED,
    Changes,
    Contract,
    changes,
    known,
    nearest,
    release_of,
    stored,
    tried,
)

__all__ = [
    "TRIED",
    "Changes",
    "Contract",
    "changes",
    "known",
    "nearest",
    "release_of",
    "stored",
    "tried",
]
