"""A slip of the keyboard is refused before anything is imported that takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

HUB = ("sweep --target-model no/such", "plan --config no/such", "supports no/such")

SCRIPT = f"""
import sys
import refused_commands as table
table.answered((table.GOLDEN / "refusals" / "early.txt").read_text())
for line in {HUB!r}:
    assert "127.0.0.1:9 cannot be reached" in table.refusal_of(line), line
heavy = ("torch", "vllm", "transformers", "pandas", "scipy", "plotly")
assert not [name for name in heavy if name in sys.modules]
sys.argv = ["nwor-bench", "sweep", "--pair", "tiny", "--dry-run"]
try:
    table.cli.main()
except SystemExit as end:
    assert end.code == 0
assert "transformers" in sys.modules
assert not {{"torch", "vllm"}} & sys.modules.keys()
"""


@pytest.mark.slow  # a process
def test_refusals_import_nothing_heavy_and_a_dry_run_not_torch(
    tmp_path: Path, pair_cache: Path
) -> None:
    paths = (CHECKOUT, CHECKOUT / "kernels", CHECKOUT / "tests")
    environ = {
        **os.environ, "PYTHONPATH": ":".join(map(str, paths)), "NWOR_BENCH_CACHE": str(pair_cache),
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
