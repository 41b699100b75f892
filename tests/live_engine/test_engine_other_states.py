"""A stock kernel of gated delta nets that staging does not know, on real vLLM: `sweep --against`
compares it with stock's, and staging leaves its states to it, by name. CPU."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import stand_in_ring
from checklist_tools import ask, greedy
from engine_tools import close, total_of
from state_tools import PROMPTS, hook_of, states_spec

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.plugin.runner_v1 import cpu_states
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions

pytestmark = pytest.mark.engine

SELECTED = {"additional_config": {stand_in_ring.ENTRY: "state"}}
ARM = 'additional_config={"gdn_decode_backend": "state"}'
REASON = "unsupported_states:3_tensors"


@pytest.mark.long
@pytest.mark.usefixtures("figures_left_out", "environment_given_back")
def test_a_sweep_compares_a_kernel_that_an_argument_selects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_ring.as_plugin(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"additional_config": {"other": 1}}
    spec = states_spec(
        "cpu", against=json.dumps(SELECTED), requests=2, batches=3, warmup=1, max_warmup=1,
        max_new_tokens=16, max_model_len=512, engine_args=own,
    )  # fmt: skip
    code = run_one(spec, PairChoice(pair="tiny-states-mtp"), RunOptions(output=tmp_path / "run"))
    assert code is ExitCode.OK
    cells = pd.read_csv(tmp_path / "run/cells.csv", keep_default_na=False).set_index("arm")
    assert dict(cells.parity) == {"": "reference", "A/A": "exact", ARM: "exact"}
    assert cells.loc[ARM].ratio_to_off != ""
    engine = json.loads((tmp_path / "run/run.json").read_text())["engine"]
    assert engine["states_unavailable"] is None
    assert engine["arms"][ARM]["states_unavailable"] == REASON
    assert engine["arms"][ARM]["state_layers"] == 0 < engine["state_layers"]
    report = (tmp_path / "run/report.md").read_text()
    assert f"off x off ({ARM})" in report
    one_slot = {"additional_config": {"nwor_state_slots": 1, stand_in_ring.ENTRY: "state"}}
    few = {"requests": 2, "batches": 1, "max_model_len": 512, "engine_args": own}
    spec = states_spec("cpu", against=json.dumps(one_slot), **few)
    with pytest.raises(ConfigError, match=r"nwor_state_slots.*3_tensors"):
        run_one(spec, PairChoice(pair="tiny-states-mtp"), RunOptions(output=tmp_path / "refused"))


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    operators = cpu_states.gdn_attention.ops
    stock = stand_in_ring.without_ring(getattr(operators, cpu_states.OPERATOR))
    with pytest.MonkeyPatch.context() as patched:  # beneath ours
        patched.setattr(operators, cpu_states.OPERATOR, stock)
        made = start_engine(pair, states_spec("cpu"))
        yield made
        close(made)


@pytest.mark.parametrize("part", ["argument", "metadata"])
def test_windows_of_a_kernel_that_is_not_known_are_stocks_by_name(
    engine: VllmEngine, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = ask(engine, "off", PROMPTS, greedy()).tokens
    name = "argument_ring" if part == "argument" else "metadata_ring_cursors"
    if part == "argument":
        ring = stand_in_ring.RingOperators(cpu_states.gdn_attention.ops, cpu_states.OPERATOR)
        monkeypatch.setattr(cpu_states.gdn_attention, "ops", ring)
    else:
        for groups in hook_of(engine).runner.attn_groups:
            for builder in (b for group in groups for b in group.metadata_builders):
                if "GDN" in type(builder).__name__:
                    build = stand_in_ring.with_cursors(builder.build)
                    monkeypatch.setattr(builder, "build", build)
    staged = ask(engine, "stage", PROMPTS, greedy())
    reasons = {window.states_reason for window in staged.windows}
    assert reasons == {f"unsupported_states:{name}"}
    assert total_of(staged.windows, "states_committed") == 0
    assert staged.total("staged_tokens") == staged.total("draft_tokens") > 0  # K/V are
    assert staged.tokens == stock
