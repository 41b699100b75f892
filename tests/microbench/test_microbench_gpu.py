"""On a GPU: every contender does the work, broken ones are seen, times come out."""

import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from nwor_bench.errors import ExitCode
from nwor_bench.run.microbench.cases import OURS, Heads, InputGroup, Nets, Shape, Spec, Window
from nwor_bench.run.microbench.inputs import MERGE, STAGED

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=3, heads=6, kv_heads=2, head_dim=128)
WINDOW = Window(5, 4)
GROUPS = [
    InputGroup("commit", "bf16", WINDOW, 0.5),
    InputGroup("commit", "fp8", WINDOW, 0.5),
    InputGroup("verify_attention", "bf16", WINDOW, context=300),
    InputGroup("verify_attention", "fp8", WINDOW, context=300),
    InputGroup("verify_attention", "bf16", WINDOW, context=300, heads=Heads(16, 2)),
    InputGroup("attention", "bf16", WINDOW, context=300),
    InputGroup("attention", "fp8", WINDOW, context=300),
    InputGroup("gated_delta", "f32", WINDOW),
    InputGroup("gated_delta", "bf16", Window(3, 8)),
]


OF_ANY_HOPPER = (STAGED, MERGE, "flash_attention_3", "triton")
"""Backends of `attention` that may not be refused: they need no compiler and no download."""


@pytest.fixture(scope="module", autouse=True)
def bench():
    from nwor_bench.run.microbench import inputs
    from nwor_bench.run.microbench.bench import cuda_bench

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "NETS", Nets(layers=2, key_heads=2, value_heads=4))
        yield cuda_bench(Spec(shape=SHAPE))[0]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.kernel}-{group.cache_dtype}")
def test_every_contender_does_the_work_and_one_that_does_nothing_is_wrong(
    bench, group: InputGroup
) -> None:
    made = bench.contenders(group)
    for each in [part for whole in made for part in (whole.one_row, whole) if part]:
        try:
            calls = each.bind()
            fault = each.check(calls[0])
        except Exception:  # a foreign library may say no; it may not do something else
            assert each.name.partition(",")[0] not in (OURS, *OF_ANY_HOPPER)
            continue
        assert fault == "", each.name
        assert each.check(lambda: None), each.name
        assert bench.timer(calls)() > 0


def test_the_cliff_of_the_8b_shape(tmp_path: Path) -> None:
    from nwor_bench.run.microbench.bench import run_kernels

    spec = Spec(kernels=("attention",), cache_dtypes=("bf16",), windows=(Window(1, 4),),
                contexts=(300, 8192), heads=(Heads(32, 8),), max_rounds=3)  # fmt: skip
    assert run_kernels(Console(width=80), spec, tmp_path / "out") == ExitCode.OK
    frame = pd.read_csv(tmp_path / "out" / "kernels.csv").set_index(["implementation", "context"])
    for backend in OF_ANY_HOPPER:
        assert (frame.loc[backend].status == "OK").all()
        assert (frame.loc[backend].one_row_us > 0).all()
        assert (frame.loc[backend].time_over_one_row > 0.5).all()


def test_a_run_writes_its_files(tmp_path: Path) -> None:
    from nwor_bench.run.microbench.bench import run_kernels

    spec = Spec(windows=(WINDOW,), acceptances=(0.5,), contexts=(300,), shape=SHAPE,
                heads=(Heads(6, 2), Heads(16, 2)), max_rounds=3)  # fmt: skip
    assert run_kernels(Console(width=80), spec, tmp_path / "out") == ExitCode.OK
    frame = pd.read_csv(tmp_path / "out" / "kernels.csv")
    ours = frame[frame.implementation == OURS]
    assert len(ours) == 6
    assert set(ours.heads.dropna()) == {"6/2", "16/2"}
    assert (ours.status == "OK").all()
    assert (ours.time_us > 0).all()
    assert json.loads((tmp_path / "out" / "kernels.json").read_text())["format_version"] == 4
