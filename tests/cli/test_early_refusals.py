"""A slip of the keyboard is refused before anything is imported that takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

REFUSALS = (
    ("sweep --scenario shrt", "did you mean 'short'"),
    ("sweep --output file/run", "it cannot be written"),
    ("sweep --output /proc/run", "it cannot be written"),
    ("sweep --pair tinny", "did you mean 'tiny'"),
    ("sweep --prompts none.jsonl", "none.jsonl: cannot be read"),
    ("sweep --requests 0", "write 1 or more"),
    ("sweep --ci-width much", "--ci-width: 'much'"),
    ("sweep --nwor-modes of", "did you mean 'off'"),
    ("sweep --kv-cache-dtype fp9", "did you mean 'fp8'"),
    ("sweep --engine-args {", "--engine-args: '{'"),
    ("sweep --file quik", "did you mean 'quick'"),
    ("sweep --ray", "it needs --file"),
    ("sweep --resume nowhere", "holds a run.json"),
    ("sweep --json -v", "give one of the two"),
    ("report nowhere", "holds a run.json"),
    ("report empty-sweep", "restore the file"),
    ("compare nowhere either", "holds a run.json"),
    ("compare a b --threshold much", "--threshold: 'much'"),
    ("compare empty-sweep empty-sweep --decide-by tim", "did you mean 'time'"),
    ("plan --config none.json", "none.json"),
    ("plan --config no/such", "cannot be reached"),
    ("plan --config none.json --acceptance 3", "--acceptance: '3'"),
    ("supports no/such", "cannot be reached"),
    ("supports m --device hoper", "did you mean 'hopper'"),
    ("pairs fetch tinny", "did you mean 'tiny'"),
)

SCRIPT = f"""
import os, sys
from nwor_bench.cli import app
heavy = ("torch", "vllm", "transformers", "pandas", "scipy", "plotly")
for arguments, words in {REFUSALS!r}:
    sys.argv = ["nwor-bench", *arguments.split()]
    try:
        app.main()
    except SystemExit as end:
        assert end.code == 2, (arguments, end.code)
    else:
        raise AssertionError(arguments)
    loaded = [name for name in heavy if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""


@pytest.mark.slow  # a process
def test_refusals_import_nothing_heavy(tmp_path: Path) -> None:
    """In one process: what any of them loads is still loaded at its end."""
    (tmp_path / "file").touch()
    (tmp_path / "empty-sweep").mkdir()
    (tmp_path / "empty-sweep/sweep.json").write_text('{"format_version": 1}')
    environ = {
        **os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'kernels'}",
        "NWOR_BENCH_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    for _, words in REFUSALS:
        assert words in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"file", "empty-sweep"}
