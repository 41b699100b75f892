"""A LoRA adapter's folder: what vLLM must know to serve it. Pure."""

from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import parse_json

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's values of max_lora_rank."""


def lora_arguments(folder: str) -> dict[str, Any]:
    """vLLM's arguments for an adapter. Raises ConfigError if the folder has none that it takes."""
    try:
        rank = parse_json((Path(folder) / "adapter_config.json").read_bytes())["r"]
        return {"enable_lora": True, "max_lora_rank": min(n for n in RANKS if n >= rank)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f"write an adapter's folder; its adapter_config.json has `r`, up to {RANKS[-1]}"
        raise ConfigError.for_field("--lora", folder, remedy) from error
