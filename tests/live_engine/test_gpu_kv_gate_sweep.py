"""What the K/V gate takes of a sweep's gate on a GPU; an engine to itself for each kind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_tools import tiny_spec
from test_gpu_kv_gate import KINDS, arguments_of

from nwor_bench.errors import ExitCode
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.usefixtures("environment_given_back"),
]


@pytest.mark.parametrize(("graphs", "cache"), KINDS)
def test_a_sweep_tells_what_the_gate_took(
    tmp_path: Path,
    graphs: str,
    cache: str,
    record_property: Callable[[str, object], None],
) -> None:
    spec = tiny_spec(
        draft_tokens=4,
        max_model_len=1024,
        max_new_tokens=60,
        batches=1,
        warmup=1,
        engine_args=json.dumps(arguments_of(graphs, cache)),
    )
    code = run_one(spec, PairChoice(pair="qwen-shape"), RunOptions(output=tmp_path / "run"))
    gate = json.loads((tmp_path / "run" / "run.json").read_text())["kv_gate"]
    record_property("seconds", (gate["seconds"], gate["gate_seconds"]))
    assert code is ExitCode.OK
    assert {cell["verdict"] for cell in gate["cells"].values()} == {"within tolerance"}
