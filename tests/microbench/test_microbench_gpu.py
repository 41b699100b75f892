"""On a GPU: every implementation does the work, broken ones are seen, times come out."""

import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from nwor_bench.errors import ExitCode
from nwor_bench.microbench.bench import fault_of
from nwor_bench.microbench.cases import OURS, Group, Heads, Nets, Shape, Spec, Window
from nwor_bench.microbench.rows import Status

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=3, heads=6, kv_heads=2, head_dim=128)
WINDOW = Window(5, 4)
GROUPS = [
    Group("commit", "bf16", WINDOW, 0.5),
    Group("commit", "fp8", WINDOW, 0.5),
    Group("verify_attention", "bf16", WINDOW, context=300),
    Group("verify_attention", "fp8", WINDOW, context=300),
    Group("gated_delta", "f32", WINDOW),
    Group("gated_delta", "bf16", Window(3, 8)),
    Group("verify_attention", "bf16", WINDOW, context=300, heads=Heads(16, 2)),
]


@pytest.fixture(autouse=True)
def few_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_bench.microbench import gated_delta

    monkeypatch.setattr(gated_delta, "NETS", Nets(layers=2, key_heads=2, value_heads=4))


@pytest.fixture(scope="module")
def bench():
    from nwor_bench.microbench.cuda_bench import make_bench

    return make_bench(Spec(shape=SHAPE))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.label)
def test_every_implementation_does_the_work(bench, group: Group) -> None:
    found = bench[0].build(group)
    faults = {each.name: fault_of(each) for each in found.runnable}
    assert faults.pop(OURS) is None
    # A foreign library may say no; it may not do something else.
    assert {fault[0] for fault in faults.values() if fault} <= {Status.REFUSED}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.label)
def test_an_implementation_that_does_nothing_is_wrong(bench, group: Group) -> None:
    for each in bench[0].build(group).runnable:
        if fault_of(each):
            continue
        calls = list(each.calls)
        each.calls[0] = lambda: None  # type: ignore[index]
        try:
            idle = each.check()
        finally:
            each.calls[0] = calls[0]  # type: ignore[index]
        assert idle, each.name


def test_a_session_writes_its_files(tmp_path: Path) -> None:
    from nwor_bench.microbench.bench import run_kernels

    spec = Spec(
        windows=(WINDOW,), acceptances=(0.5,), contexts=(300,), heads=(Heads(6, 2), Heads(16, 2)),
        shape=SHAPE, max_rounds=3,
    )  # fmt: skip
    assert run_kernels(Console(width=80), spec, tmp_path / "out") == ExitCode.OK
    frame = pd.read_csv(tmp_path / "out" / "kernels.csv")
    ours = frame[frame.implementation == OURS]
    assert len(ours) == 6
    assert set(ours.heads.dropna()) == {"6/2", "16/2"}
    assert (ours.status == "OK").all()
    assert (ours.time_us > 0).all()
    assert json.loads((tmp_path / "out" / "kernels.json").read_text())["format_version"] == 3
