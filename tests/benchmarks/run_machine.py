"""What a run was measured on, in words, from its header; and what stays of a measurement."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def machine_of(header: dict[str, Any], packages: Sequence[str] = ("vllm", "torch")) -> str:
    """GPU, driver and these packages' versions."""
    environment = header["environment"]
    gpu = environment["gpus"][0]
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in packages)
    return f"One {gpu['name']}, driver {gpu['driver']}, {versions}"


def keep_measured(folder: Path, output: Path, name: str) -> None:
    """Copy a measurement's rows and facts, `name`.csv and .json, to where its page goes."""
    if folder.resolve() == output.resolve():
        return
    output.mkdir(parents=True, exist_ok=True)
    for ending in (".csv", ".json"):
        shutil.copyfile(folder / f"{name}{ending}", output / f"{name}{ending}")
