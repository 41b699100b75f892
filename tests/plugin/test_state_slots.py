"""One state slot a request, without an engine: specs, tables, what must be staged, and refusals."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from test_window_states import COUNTS, HEADS, KERNELS, LENGTH, VALUES, Pieces
from torch import Tensor
from v2_pieces import make_hook, run_step

from nwor_bench.errors import EngineError
from nwor_bench.plugin import state_slots
from nwor_bench.plugin.one_slot_states import ONE_SLOT, OneSlotStates, window_states
from nwor_bench.plugin.patching import PatchSet
from nwor_bench.plugin.state_slots import EqualColumns, require_one_slot, slot_patches
from nwor_bench.plugin.states import StateOutcome, WindowStates
from nwor_bench.records.state_slots import FIELD, one_slot
from nwor_bench.records.types import NworMode, ScvMode

pytestmark = pytest.mark.slow  # vLLM's recurrent layers are imported

SWITCH = {"nwor_state_slots": 1}
COUNTS_CHANGE = "num_speculative_tokens_per_batch_size"


def config_of(**changes: Any) -> Any:
    """The parts of a VllmConfig that are looked at; `changes` by name, of any part."""
    speculation: dict[str, Any] = {COUNTS_CHANGE: None}
    cache = {"mamba_cache_mode": "none", "use_replayssm": False}
    own = {"additional_config": SWITCH, "num_speculative_tokens": 4}
    for part in (speculation, cache, own):
        part |= {name: changes[name] for name in part if name in changes}
    return SimpleNamespace(
        **own,
        cache_config=SimpleNamespace(**cache),
        speculative_config=changes.get("speculation", SimpleNamespace(**speculation)),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )


def test_the_switch_is_an_entry_of_additional_config() -> None:
    assert one_slot(SWITCH)
    assert not any(map(one_slot, ({}, None, {"other": 1}, object())))


def runner_of(additional_config: Any) -> Any:
    """vLLM's runner, as far as it decides how states are staged."""
    vllm = SimpleNamespace(additional_config=additional_config)
    device = torch.device("cpu")
    return SimpleNamespace(vllm_config=vllm, device=device, max_num_reqs=3, dtype=torch.float32)


@pytest.mark.parametrize("config", [None, {}, {"other": 1}])
def test_other_engines_have_a_slot_for_each_token(config: Any) -> None:
    pieces = Pieces()
    found = window_states(
        runner_of(config), pieces.layers, pieces.window, kernels=KERNELS, length=5, requests=3
    )
    assert type(found) is WindowStates
    assert found.rings is None


@dataclass(frozen=True)
class Spec:
    num_speculative_blocks: int = 4
    shapes: tuple[int, ...] = (3, 5)


def blocks_for_drafts(layer: Any, config: Any, stock: Spec = Spec()) -> int:
    spec = state_slots._without_drafts(lambda layer, config: stock)(layer, config)
    return int(spec.num_speculative_blocks)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    found = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    return found.__new__(found)


def test_gated_delta_nets_ask_for_no_slot_for_drafts(net: Any) -> None:
    assert blocks_for_drafts(net, config_of()) == 0
    for layer in (net, object()):
        assert blocks_for_drafts(layer, config_of(additional_config={})) == 4
    with refused(FIELD, value=1, naming="object"):
        blocks_for_drafts(object(), config_of())


@pytest.mark.parametrize(
    ("field", "value", "environ", "changes"),
    [
        (FIELD, 2, {}, {"additional_config": {"nwor_state_slots": 2}}),
        (FIELD, True, {}, {"additional_config": {"nwor_state_slots": True}}),
        (FIELD, 1, {}, {"speculation": None}),
        (f"speculative_config: {COUNTS_CHANGE}", [(1, 1, 2)], {}, {COUNTS_CHANGE: [(1, 1, 2)]}),
        ("enable_prefix_caching", True, {}, {"mamba_cache_mode": "align"}),
        ("use_replayssm", True, {}, {"use_replayssm": True}),
        ("num_speculative_tokens", 16, {}, {"num_speculative_tokens": 16}),
        # These leave windows to stock.
        ("VLLM_NWOR_MODE", "interleave", {"VLLM_NWOR_MODE": "interleave"}, {}),
        ("VLLM_NWOR_MODE", "off", {"VLLM_NWOR_MODE": "off"}, {}),
        ("VLLM_NWOR_ATTENTION", "stock", {"VLLM_NWOR_ATTENTION": "stock"}, {}),
    ],
)
def test_what_one_slot_cannot_go_with(
    net: Any,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: object,
    environ: dict[str, str],
    changes: dict[str, Any],
) -> None:
    for variable, text in environ.items():
        monkeypatch.setenv(variable, text)
    with refused(field, value=value):
        blocks_for_drafts(net, config_of(**changes))


def test_a_ring_has_room_for_windows_of_16_tokens(net: Any) -> None:
    assert blocks_for_drafts(net, config_of(num_speculative_tokens=15), Spec(15)) == 0


@pytest.mark.parametrize(("stock", "naming"), [(Spec(0), "1_slots"), (Spec(4, (1, 2, 3)), "3_t")])
def test_one_slot_is_refused_where_stock_keeps_states_otherwise(
    net: Any, stock: Spec, naming: str
) -> None:
    with refused(FIELD, value=1, naming=naming):
        blocks_for_drafts(net, config_of(), stock)
    assert blocks_for_drafts(net, config_of(additional_config={}), stock) is not None


def test_the_patches_are_undone() -> None:
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    before = MambaBase.get_kv_cache_spec, GDNAttentionMetadataBuilder.__init__
    patches = PatchSet(slot_patches())
    patches.apply()
    assert MambaBase.get_kv_cache_spec is not before[0]
    patches.undo()
    assert (MambaBase.get_kv_cache_spec, GDNAttentionMetadataBuilder.__init__) == before


class Builder:
    """The parts of vLLM's builder that are looked at."""

    num_spec, device = 4, torch.device("cpu")
    slots: Tensor | None = None

    def __init__(self, config: Any):
        self.vllm_config = config

    def build(self) -> Any:
        return Metadata(self.slots)

    update_block_table = build


@dataclass(frozen=True)
class Metadata:
    spec_state_indices_tensor: Tensor | None


def built(config: Any) -> Any:
    builder = Builder.__new__(Builder)
    state_slots._with_equal_columns(Builder.__init__)(builder, config)
    return builder


@pytest.mark.parametrize("method", ["build", "update_block_table"])
def test_tables_get_equal_columns_at_one_address(method: str) -> None:
    builder = built(config_of())
    places = set()
    for slots in ([[7], [9]], [[3], [4]]):
        builder.slots = torch.tensor(slots, dtype=torch.int32)
        table = getattr(builder, method)().spec_state_indices_tensor
        assert table.tolist() == [slot * 5 for slot in slots]
        assert table.is_contiguous()
        places.add(table.data_ptr())
    assert len(places) == 1
    for found in (None, torch.zeros(2, 5, dtype=torch.int32)):
        builder.slots = found
        assert getattr(builder, method)().spec_state_indices_tensor is found


def test_other_builders_are_left_alone() -> None:
    assert not {"build", "update_block_table"} & set(vars(built(config_of(additional_config={}))))
    assert EqualColumns(Builder(config_of()))._table.shape == (3, 5)


class OneSlot(Pieces):
    """Each request has one slot, in all columns, and a ring; K/V are written directly."""

    def __init__(self) -> None:
        super().__init__()
        found = window_states(
            runner_of(SWITCH), self.layers, self.window, kernels=KERNELS, length=LENGTH, requests=3
        )
        assert isinstance(found, OneSlotStates)
        self.states, self.rings = found, found.rings
        assert self.states.allocate() is None
        self.indices[:] = self.indices[..., :1].expand_as(self.indices).clone()
        self.step: dict[str, Any] = {"num_spec_decode_tokens": 2 * LENGTH}

    def metadata(self, group: int, **changes: Any) -> Any:
        return super().metadata(group, **self.step | changes)


def as_committed(pieces: OneSlot) -> list[Tensor]:
    """Each layer's states as if every request had slots of its own, put where the one slot is."""
    kept, columns = pieces.indices.clone(), range(LENGTH)
    others = sorted(set(range(1, 20)) - set(kept.flatten().tolist()))
    found = []
    for number, layer in enumerate(pieces.layers):
        free, own = iter(others), kept[layer.group].clone()
        for row, accepted in enumerate(pieces.accepted.tolist()):
            for column in set(columns) - {accepted - 1}:
                own[row, column] = next(free)
        pieces.indices[layer.group] = own
        state = pieces.as_stock(number)
        pieces.indices[:] = kept
        for row, count in enumerate(COUNTS.tolist()):
            state[int(kept[layer.group, row, 0])] = state[int(own[row, count - 1])]
        found.append(state)
    return found


BESIDE = {"num_prefills": 1, "spec_sequence_masks_cpu": torch.tensor([True, False, True])}
"""Metadata of a step whose second request is a prefill."""


@pytest.mark.parametrize("beside", [False, True], ids=["windows alone", "beside a prefill"])
def test_the_trace_sees_windows_that_run_alone(beside: bool) -> None:
    """Beside a prefill the kernel's rows are not those that vLLM passed the layer."""
    pieces, seen = OneSlot(), list[int]()
    pieces.step |= BESIDE if beside else {}
    pieces.states.trace = SimpleNamespace(verified=lambda number, mixed, out: seen.append(number))
    pieces.rings.place(["a", "new", "b"] if beside else ["a", "b"])
    pieces.verify(0, 1, 2)
    assert seen == ([] if beside else [0, 1, 2])


def test_rows_without_drafts_are_stocks() -> None:
    pieces = OneSlot()
    assert not pieces.states.stages(pieces.metadata(0, num_spec_decode_tokens=2))
    assert not pieces.states.stages(pieces.metadata(0, spec_sequence_masks=None))
    assert pieces.states.stages_whole(pieces.metadata(0))
    assert not pieces.states.stages_whole(pieces.metadata(0, num_prefills=1))


def test_a_window_that_cannot_be_staged_ends_the_step() -> None:
    pieces = OneSlot()
    with refused(ONE_SLOT, EngineError, value="states:more_requests_than_records"):
        pieces.states.stages(pieces.metadata(0, num_spec_decodes=4))
    with refused(ONE_SLOT, EngineError, value="unsupported_states:argument_ring"):
        pieces.states.stages(pieces.metadata(0), {"ring"})
    pieces.verify(0, 2)
    with refused(ONE_SLOT, EngineError, value=2):
        pieces.states.commit(COUNTS)
    with refused(ONE_SLOT, EngineError):
        pieces.states.abandon()
    pieces.states.abandon()  # nothing is left
    pieces.states.give_up("states:planted")
    with refused(ONE_SLOT, EngineError, value="states:planted"):
        pieces.states.stages(pieces.metadata(0))


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (SimpleNamespace(why_not_one_slot=lambda: "kv_transfer"), "kv_transfer"),
        (None, "attach:RuntimeError (planted)"),
    ],
)
def test_an_engine_that_could_not_stage_does_not_start(hook: Any, why: str) -> None:
    worker = SimpleNamespace(vllm_config=config_of())
    with refused(FIELD, value=1, naming=why):
        require_one_slot(worker, hook, "attach:RuntimeError (planted)")
    require_one_slot(worker, SimpleNamespace(why_not_one_slot=lambda: None), None)
    require_one_slot(SimpleNamespace(vllm_config=config_of(additional_config={})), None, why)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A V2 hook whose engine has one slot; its states note what is committed."""
    found = make_hook(monkeypatch)
    found.one_slot = True
    calls: list[list[int]] = []
    found.states = SimpleNamespace(
        commit=lambda counts: (calls.append(counts.tolist()), StateOutcome(3, None))[1],
        rows=None, rings=None, follow=lambda trace: None, abandon=lambda: None,
        unavailable="not here",
    )  # fmt: skip
    found.commits = calls
    return found


@pytest.mark.parametrize("mode", [NworMode.OFF, NworMode.CONTROL])
def test_every_other_mode_is_refused(hook: Any, mode: NworMode) -> None:
    with refused("NWOR mode", value=str(mode)):
        hook.set_modes(mode, ScvMode.OFF)
    with refused("NWOR mode", value="off"):
        hook.interleave(object())
    hook.interleave(None)
    hook.set_modes(NworMode.STAGE, ScvMode.OFF)


def test_states_are_committed_though_the_kv_is_written_directly(hook: Any) -> None:
    hook.staging_unavailable = "planted"
    run_step(hook, ["a", "b"], set())
    assert hook.commits == [[2, 2]]
    [window] = hook.drain(None)
    assert (window.fallback_reason, window.states_committed) == ("planted", 6)


def test_stocks_graph_of_windows_is_never_replayed(hook: Any) -> None:
    replayed: list[int | None] = []
    replay = hook._wrap_run_fullgraph(lambda desc: replayed.append(desc.uniform_token_count))
    for tokens in (5, None):
        with refused(ONE_SLOT, EngineError):
            replay(SimpleNamespace(uniform_token_count=tokens))
    replay(SimpleNamespace(uniform_token_count=1))
    hook.one_slot = False
    replay(SimpleNamespace(uniform_token_count=5))
    assert replayed == [1, 5]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"staging_unavailable": "kv_transfer"}, "kv_transfer"),
        ({"states_unavailable": "unsupported_states:X"}, "unsupported_states:X"),
        ({"states": None}, "no recurrent layers"),
        ({"states": SimpleNamespace(requests=7)}, "max_num_seqs must be at most 7"),
        ({"graphs": SimpleNamespace(unavailable="graph_capture:X")}, "graph_capture:X"),
        (
            {
                "states": SimpleNamespace(record_bytes=5_600_000_000),
                "states_unavailable": "states:OutOfMemoryError",
            },
            "states:OutOfMemoryError; records take 5.6 GB beside the cache: lower "
            "gpu_memory_utilization or max_num_seqs",
        ),
    ],
)
def test_why_windows_cannot_all_be_staged(
    hook: Any, changes: dict[str, Any], why: str | None
) -> None:
    hook.runner.compilation_config = SimpleNamespace(static_forward_context={})
    vars(hook).update({"states": SimpleNamespace(requests=8), **changes})
    found = hook.why_not_one_slot()
    assert found is None if why is None else why in found


def test_stocks_kernel_stages_beside_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `_forward_core` runs as stock's, and its kernel of windows is ours."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as stock

    from nwor_bench.plugin.runner_v2 import gated_delta

    pieces, calls = OneSlot(), []
    pieces.rings.place(["a", "new", "b"])
    own = pieces.layers[0].layer
    own.prefix = "net.0"
    metadata = pieces.metadata(0, **BESIDE)
    step = SimpleNamespace(attn_metadata={"net.0": metadata})
    monkeypatch.setattr(gated_delta, "get_forward_context", lambda: step)
    monkeypatch.setattr(stock, gated_delta.KERNEL, lambda **named: calls.append(named))
    patch = gated_delta._kernel_patch(pieces.states)
    patch.apply()
    mixed, a, b = pieces.given[0]
    q, k, v = mixed.split([16, 16, HEADS * VALUES], dim=-1)
    parts = {"q": q.view(1, -1, 2, 8), "k": k.view(1, -1, 2, 8), "v": v.view(1, -1, HEADS, VALUES)}
    given = {**parts, "a": a, "b": b, "A_log": own.A_log}
    kernel, window = getattr(stock, gated_delta.KERNEL), {"num_accepted_tokens": pieces.accepted}
    out, _ = kernel(**given, **window)
    [expected] = pieces.verify(0)
    assert torch.equal(out.squeeze(0), expected)
    assert calls == []
    kernel(**given)  # rows without drafts
    kernel(**given | {"A_log": a}, **window)  # another engine's
    metadata.num_spec_decode_tokens = 2
    kernel(**given, **window)
    assert len(calls) == 3
    patch.undo()
