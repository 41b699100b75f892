"""A slip of the keyboard is refused before anything is imported that takes seconds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

HUGE = '{"kv_cache_memory_bytes":1000000000000000}'

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
    ("sweep --resume done", "this run is complete"),
    ("sweep --output done", "it already holds a run"),
    ("sweep --file cells.toml", "run 1 (tiny short, 4 drafts, 8 requests"),
    ("sweep --cells stage-graph", "SCV graph and adaptive need one"),
    ("sweep --target-model bare", "it has no tokenizer"),
    ("sweep --target-model model --max-model-len 99999", "max_position_embeddings is 4096"),
    (
        'sweep --target-model model --engine-args {"kv_cache_memory_bytes":1000000000000000}',
        "no free memory",
    ),
    ("sweep --target-model no/such", "cannot be reached"),
    ("kernels", "needs a CUDA device"),
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

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip

CELLS = """
description = "cells that need a GPU"
[axes]
pairs = ["tiny"]
scenarios = ["short"]
[settings]
batches = 3
cells = ["stage-graph"]
"""

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
sys.argv = ["nwor-bench", "sweep", "--pair", "tiny", "--dry-run"]
try:
    app.main()
except SystemExit as end:
    assert end.code == 0
assert "transformers" in sys.modules
assert not {{"torch", "vllm"}} & sys.modules.keys()
"""


@pytest.mark.slow  # a process
def test_refusals_import_nothing_heavy_and_a_dry_run_not_torch(
    tmp_path: Path, pair_cache: Path
) -> None:
    """In one process: what any of them loads is still loaded at its end."""
    (tmp_path / "file").touch()
    for name in ("empty-sweep", "done", "bare", "model"):
        (tmp_path / name).mkdir()
    shutil.copy(CHECKOUT / "tests/golden/run/run.json", tmp_path / "done")
    (tmp_path / "bare/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model/tokenizer.json").touch()
    (tmp_path / "cells.toml").write_text(CELLS)
    made = set(tmp_path.rglob("*"))
    (tmp_path / "empty-sweep/sweep.json").write_text('{"format_version": 1}')
    environ = {
        **os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'kernels'}",
        "NWOR_BENCH_CACHE": str(pair_cache), "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    for _, words in REFUSALS:
        assert words in done.stderr
    assert set(tmp_path.rglob("*")) == made | {tmp_path / "empty-sweep/sweep.json"}
