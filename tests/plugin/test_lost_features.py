"""What a new vLLM takes is off by itself, under its reason; stock and the rest of us go on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from contracted_vllm import ContractedVllm
from refusals import refused
from test_refusals import attention_layer, reason_of, runner_with, two
from v2_pieces import make_runner, run_step

from nwor_bench.errors import EngineError
from nwor_bench.instruments import contract
from nwor_bench.plugin.patching import PatchError
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.records.types import NworMode, ScvMode

pytestmark = pytest.mark.slow  # vLLM's runner is imported

Lose = Callable[..., str]


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Take a name from the installed vLLM, or change a function's form; the reason to come."""

    def take(module: str, path: str, *, form: bool = False) -> str:
        changed = {"other" if form else "without": (module, path)}
        source = ContractedVllm(**changed)
        monkeypatch.setattr(contract, "installed_source", lambda: source)
        return f"vllm: {path} {'has other arguments: + surprise' if form else 'is gone'}"

    return take


def hook_of(runner: Any) -> Any:
    from nwor_bench.plugin.attaching import make_hook
    from nwor_bench.plugin.settings import PluginSettings

    return make_hook(runner, PluginSettings(NworMode.STAGE, ScvMode.OFF, False))


def test_without_what_every_hook_needs_none_is_attached(lose: Lose) -> None:
    reason = lose("v1.worker.gpu.model_runner", "GPUModelRunner.sample", form=True)
    with refused("cannot attach", PatchError, naming=reason):
        hook_of(make_runner())


def test_without_staging_windows_are_written_directly_and_counted(
    lose: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankVote, "of_worker", RankVote)
    reason = lose("v1.worker.gpu.cudagraph_utils", "ModelCudaGraphManager.capture", form=True)
    compilation = SimpleNamespace(static_forward_context={})
    hook = hook_of(make_runner(compilation_config=compilation))
    hook.attach()
    hook.set_modes(NworMode.STAGE, ScvMode.OFF)
    run_step(hook, ["a-1", "b-2"])
    (window,) = hook.drain({"a": 9, "b": 9})
    assert (window.fallback_reason, window.staged_tokens) == (reason, 0)


def test_without_the_joined_update_it_is_vllms_own_launch(lose: Lose) -> None:
    from nwor_bench.plugin.runner_v2.stock_update import find_update

    reason = lose("v1.worker.gpu.input_batch", "post_update", form=True)
    assert find_update() == reason
    assert reason_of(runner_with(two())) is None  # staging goes on


def test_without_states_stock_writes_them_and_kv_are_staged(lose: Lose) -> None:
    from nwor_bench.plugin.layers import TargetLayers
    from nwor_bench.plugin.runner_v2.gated_delta import set_up_states

    name = "QwenGatedDeltaNetAttention._forward_core"
    reason = lose("model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", name, form=True)
    target = TargetLayers(recurrent=["0"])
    found = set_up_states(SimpleNamespace(num_speculative_steps=2), target, None, None)  # type: ignore[arg-type]
    assert found == (None, reason)
    assert reason_of(runner_with(two())) is None


def test_layers_of_an_implementation_that_is_lost_are_refused(lose: Lose) -> None:
    name = "TritonAttentionImpl.forward"
    reason = lose("v1.attention.backends.triton_attn", name, form=True)
    assert reason_of(runner_with(two())) is None
    assert reason_of(runner_with(two(attention_layer("Triton")))) == reason


def test_without_one_state_slot_the_switch_is_refused(lose: Lose) -> None:
    from nwor_bench.plugin.state_slots import require_one_slot, slot_patches
    from nwor_bench.records.state_slots import FIELD

    reason = lose("v1.kv_cache_interface", "MambaSpec")
    assert slot_patches() == []
    config = SimpleNamespace(additional_config={"nwor_state_slots": 1})
    hook = SimpleNamespace(why_not_one_slot=lambda: None)
    with refused(FIELD, naming=reason, value=1):
        require_one_slot(SimpleNamespace(vllm_config=config), hook, None)
    require_one_slot(SimpleNamespace(vllm_config=SimpleNamespace(additional_config={})), hook, None)


def test_without_draft_counts_neither_a_server_nor_a_sweep_alternates_them(lose: Lose) -> None:
    from nwor_bench.instruments.draft_counts import CountSwitch
    from nwor_bench.plugin.draft_patches import draft_patches

    reason = lose("engine.arg_utils", "EngineArgs.create_speculative_config")
    with refused("VLLM_NWOR_DRAFTS", naming=reason):
        draft_patches()
    with pytest.raises(EngineError, match=reason):
        CountSwitch(SimpleNamespace(dynamic_sd_lookup=[0, 1, 2]), range(2))


def test_without_vllms_counters_a_sweep_stops(lose: Lose) -> None:
    from nwor_bench.engine.readings import read_counters

    lose("v1.spec_decode.metrics", "texts.vllm:spec_decode_num_drafts")
    with pytest.raises(EngineError, match="has no vllm:spec_decode_num_drafts"):
        read_counters(None)


def test_without_the_gates_names_the_cache_is_not_compared(lose: Lose) -> None:
    from nwor_bench.plugin.observe.kv_rows import KvRows

    lose("v1.core.sched.output", "NewRequestData.block_ids")
    rows = object.__new__(KvRows)
    rows._groups = {"group": SimpleNamespace(why_unreadable=lambda: None)}  # type: ignore[dict-item]
    assert rows.why_unreadable() == "vllm: NewRequestData has no block_ids"


def test_without_vllms_registry_a_server_has_no_counters_of_ours(
    lose: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_bench.plugin.observe import metrics

    for name in (metrics.SWITCH, metrics.FOLDER, metrics.VLLM_FOLDER):
        monkeypatch.delenv(name, raising=False)
    lose("v1.metrics.prometheus", "get_prometheus_registry")
    metrics.share_folder()
    assert metrics.folder_of() is None
