"""What a run was measured on, in words, from its header."""

from collections.abc import Sequence
from typing import Any


def machine_of(header: dict[str, Any], packages: Sequence[str] = ("vllm", "torch")) -> str:
    """GPU, driver and these packages' versions."""
    environment = header["environment"]
    gpu = environment["gpus"][0]
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in packages)
    return f"One {gpu['name']}, driver {gpu['driver']}, {versions}"
