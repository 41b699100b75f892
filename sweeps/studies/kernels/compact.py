"""kernels.csv.gz from a folder of `nwor-bench kernels`.

    nwor-bench kernels --context 1024,8192 --rounds 20 --output FOLDER
    python sweeps/studies/kernels/compact.py FOLDER

Keeps only the columns that the page uses; comments before the table have the command, the machine
and the shape.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd

COLUMNS = {
    "kernel": "kernel",
    "implementation": "implementation",
    "status": "status",
    "cache_dtype": "cache_dtype",
    "requests": "requests",
    "drafts": "drafts",
    "acceptance": "acceptance",
    "context": "context",
    "heads": "heads",
    "staged_tokens": "staged_tokens",
    "rounds": "n",
    "time_us": "time_us",
    "time_over_nwor": "ratio",
    "time_over_nwor_low": "ratio_low",
    "time_over_nwor_high": "ratio_high",
    "reason": "reason",
}
"""Columns of `nwor-bench kernels` that are kept, and their names here."""


def machine_of(result: dict[str, Any]) -> str:
    """The GPU, its ceiling, the shape and the libraries, from kernels.json."""
    facts, shape = result["device"], result["spec"]["shape"]
    heads = " and ".join(f"{each['query']}/{each['kv']}" for each in result["spec"]["heads"])
    packages = result["environment"]["packages"]
    libraries = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "vllm"))
    return (
        f"{facts['gpu']}, {facts['l2_bytes'] / 2**20:.0f} MiB of L2; a large device-to-device copy "
        f"moves {facts['copy_gb_per_s']:,.0f} GB/s. {shape['layers']} layers, {heads} "
        f"query / K/V heads of {shape['head_dim']}. {libraries}."
    )


def compact(rows: pd.DataFrame, command: str, machine: str) -> str:
    """The CSV's text."""
    kept = rows[list(COLUMNS)].rename(columns=COLUMNS)
    lines = [f"# command: {command}\n", f"# machine: {machine}\n"]
    return "".join(lines) + kept.to_csv(index=False, float_format="%.5g")


def main() -> None:
    """Read the folder and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    result = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    text = compact(pd.read_csv(folder / "kernels.csv"), result["command"], machine_of(result))
    packed = gzip.compress(text.encode("utf-8"), mtime=0)
    Path(__file__).with_name("kernels.csv.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
