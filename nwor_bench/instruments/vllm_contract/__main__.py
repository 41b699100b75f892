"""Store the contract of a vLLM: `python -m nwor_bench.instruments.vllm_contract [FOLDER VERSION]`.

Without arguments the installed vLLM's; else of the package `vllm` in FOLDER, such as an unpacked
wheel. Prints what changed since the nearest stored version.
"""

import sys
from pathlib import Path

from nwor_bench.instruments.versions import source_root, vllm_version
from nwor_bench.instruments.vllm_contract import Contract, changes, nearest, stored

STORED = Path(__file__).parent / "stored"


def main(arguments: list[str]) -> None:
    """Read, compare, store."""
    root, version = arguments or (source_root(), vllm_version())
    if root is None or version is None:
        sys.exit("vLLM is not installed; name a folder and a version")
    contract = Contract.read(str(version).partition("+")[0], Path(root))
    if stored():
        difference = changes(contract, nearest(contract.version))
        print(difference)
        for name, how in difference.changed.items():
            print(f"  {how:9} {name}")
    STORED.mkdir(exist_ok=True)
    (STORED / f"{contract.version}.json").write_text(contract.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
