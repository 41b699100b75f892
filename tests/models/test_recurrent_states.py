"""Recurrent states' bytes against an independent count: windows walked token by token, state
element by state element, over a DRAM that counts what crosses its border and holds values."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from counted_dram import Dram
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.config_json import KNOWN_TYPES, read_shape
from nwor_bench.models.recurrent import (
    ONE_STATE,
    REPLAY_FUSED,
    REPLAY_OWN,
    STATE_STRATEGIES,
    STOCK,
    RecurrentLayers,
    RecurrentState,
    StateLoad,
    StateStrategy,
    pays_from,
    saved_of_states,
    state_bytes,
)
from nwor_bench.models.shape import ModelShape

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

LOAD = StateLoad(requests=1, draft_tokens=4, acceptance=0.5, activation_bits=16)


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def published(name: str, **changes: Any) -> ModelShape:
    return read_shape({**config_of(name), **changes}, "--config", name)


def recurrent(name: str, **changes: Any) -> RecurrentLayers:
    found = published(name, **changes).recurrent
    assert found is not None
    return found


@dataclass(frozen=True)
class Layer:
    """One layer of a toy recurrence: every element adds its token's input."""

    elements: int
    size: int
    record: int
    """Bytes of a token's input."""

    def load(self, dram: Dram, slot: Any) -> list[int]:
        return [dram.read((slot, n), self.size) for n in range(self.elements)]

    def store(self, dram: Dram, slot: Any, state: list[int]) -> None:
        for n, value in enumerate(state):
            dram.write((slot, n), value, self.size)

    def add(self, state: list[int], token: int) -> list[int]:
        return [value + token for value in state]


def run_stock(dram: Dram, layer: Layer, tokens: list[int], kept: int) -> list[int]:
    """Every token's state is stored; the next step would read the last kept one."""
    state = layer.load(dram, "committed")
    for place, token in enumerate(tokens):
        state = layer.add(state, token)
        layer.store(dram, place, state)
    return [dram.cells[kept - 1, n] for n in range(layer.elements)]


def run_one_state(dram: Dram, layer: Layer, tokens: list[int], kept: int) -> list[int]:
    """The window's states stay on chip; the kept one is stored."""
    states = [layer.load(dram, "committed")]
    for token in tokens:
        states.append(layer.add(states[-1], token))
    layer.store(dram, "committed", states[kept])
    return [dram.cells["committed", n] for n in range(layer.elements)]


def run_replay(dram: Dram, layer: Layer, tokens: list[int], kept: int, own: bool) -> list[int]:
    """Tokens' inputs are stored; the accepted ones are added to the last committed state."""
    state = layer.load(dram, "committed")
    for place, token in enumerate(tokens):
        dram.write(("record", place), token, layer.record)
    if own:
        state = layer.load(dram, "committed")
    for place in range(kept):
        state = layer.add(state, dram.read(("record", place), layer.record))
    layer.store(dram, "committed", state)
    return [dram.cells["committed", n] for n in range(layer.elements)]


def walked(strategy: StateStrategy, layer: Layer, tokens: list[int], kept: int) -> Dram:
    """One request and layer; the state that is left must be that of the kept tokens alone."""
    dram = Dram({("committed", n): 7 * n for n in range(layer.elements)})
    if strategy is STOCK:
        left = run_stock(dram, layer, tokens, kept)
    elif strategy is ONE_STATE:
        left = run_one_state(dram, layer, tokens, kept)
    else:
        left = run_replay(dram, layer, tokens, kept, own=strategy is REPLAY_OWN)
    assert left == [7 * n + sum(tokens[:kept]) for n in range(layer.elements)]
    return dram


@given(
    strategy=st.sampled_from(STATE_STRATEGIES),
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    accepted=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    layers=st.integers(1, 2),
    drafts=st.integers(4, 6),
    wide=st.booleans(),
)
def test_bytes_are_those_of_windows_walked_by_hand(
    strategy: StateStrategy, shape: tuple[int, ...], accepted: list[int], layers: int, drafts: int,
    wide: bool,
) -> None:  # fmt: skip
    heads, rows, columns = shape
    bits = 32 if wide else 16
    state = RecurrentState("toy", heads, rows, columns, 5, 4, bits, 16, 3, 2, 0)
    layer = Layer(heads * rows * columns, bits // 8, record=3 * 2 + 2 * 4)
    read = written = 0
    for number in accepted:
        for _ in range(layers):
            dram = walked(strategy, layer, list(range(1, drafts + 2)), number + 1)
            read, written = read + dram.read_bytes, written + dram.written_bytes
            for _column in range(4 - 1):
                read += 5 * 2
            for _column in range(4 - 1 + drafts):
                written += 5 * 2
    load = StateLoad(len(accepted), drafts, sum(accepted) / (drafts * len(accepted)), 16)
    found = state_bytes(RecurrentLayers(layers, state), strategy, load)
    assert (found.read, found.written) == pytest.approx((read, written))


def test_qwen3_nexts_states_in_float32_are_75_mb_a_request_and_draft() -> None:
    wide = recurrent("Qwen3-Next-80B-A3B", mamba_ssm_dtype="float32")
    assert wide.state_bytes() == 36 * 32 * 128 * 128 * 4 == 75_497_472
    one_more = state_bytes(wide, STOCK, replace(LOAD, draft_tokens=5)).written
    columns = wide.count * wide.state.conv_column_bytes()
    assert one_more - state_bytes(wide, STOCK, LOAD).written == 75_497_472 + columns
    assert recurrent("Qwen3-Next-80B-A3B").state_bytes() == 75_497_472 / 2  # the model's dtype


@pytest.mark.parametrize(
    ("name", "kind", "layers", "megabytes", "billions"),
    [
        ("Qwen3-Next-80B-A3B", "gated delta net", 36, 37.7, 80),
        ("Qwen3.5-27B", "gated delta net", 48, 151.0, 27),
        ("Kimi-Linear-48B-A3B", "KDA", 20, 41.9, 48),
        ("Nemotron-H-56B", "Mamba2", 54, 906.0, 56),
    ],
)
def test_published_hybrids(
    name: str, kind: str, layers: int, megabytes: float, billions: float
) -> None:
    shape, found = published(name), recurrent(name)
    assert (found.state.kind, found.count) == (kind, layers)
    assert round(found.state_bytes() / 1e6, 1) == megabytes
    assert shape.parameters() / 1e9 == pytest.approx(billions, rel=0.03)
    assert shape.model_type in KNOWN_TYPES
    assert len(shape.attending) + layers + sum(
        not layer.attends and not layer.recurrent for layer in shape.layers
    ) == len(shape.layers)  # fmt: skip


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Kimi-Linear-48B-A3B", "Nemotron-H-56B"])
def test_replay_pays_except_for_one_draft_in_a_launch_of_its_own(name: str) -> None:
    layers = recurrent(name)
    assert pays_from(layers, REPLAY_FUSED, LOAD) == pays_from(layers, ONE_STATE, LOAD) == 1
    assert pays_from(layers, REPLAY_OWN, LOAD) == 2
    single = replace(LOAD, draft_tokens=1)
    assert saved_of_states(layers, REPLAY_OWN, single) < 0 < saved_of_states(
        layers, REPLAY_FUSED, single
    )  # fmt: skip
    assert saved_of_states(layers, STOCK, LOAD) == 0


def test_a_record_as_large_as_the_state_never_pays() -> None:
    state = RecurrentState("toy", 1, 1, 1, 1, 4, 16, 16, 1, 0, 0)
    assert pays_from(RecurrentLayers(1, state), REPLAY_OWN, LOAD) is None


def test_ranks_share_the_heads() -> None:
    layers = recurrent("Qwen3.5-27B")
    whole = state_bytes(layers, REPLAY_FUSED, LOAD).total
    assert state_bytes(layers, REPLAY_FUSED, replace(LOAD, ranks=4)).total == whole / 4
    assert published("Qwen3.5-27B").fits_ranks(4)
    assert not published("Qwen3-Next-80B-A3B", linear_num_value_heads=6).fits_ranks(4)


def test_a_step_holds_the_states_and_kv_of_attending_layers_alone() -> None:
    shape = published("Qwen3-Next-80B-A3B")
    model = ByteModel(shape, 16, 16, 16)
    load = Workload(requests=2, context=100, draft_tokens=4, acceptance=0.5)
    assert model.cache_row(1) == 12 * 2 * 2 * 256 * 2  # 12 layers, K and V, 2 heads
    assert model.context_read(load) == 2 * 100 * model.cache_row(1)
    parts = model.weights_read(load) + model.context_read(load) + model.first_tokens_written(load)
    states = model.step(load) - parts - 8 * model.cache_row(1)
    one = 36 * (32 * 128 * 128 * 2)
    assert states == pytest.approx(2 * (6 * one + 36 * 8192 * 2 * (3 + 7)))


def test_reserved_slots_are_one_a_token() -> None:
    layers = recurrent("Qwen3-Next-80B-A3B")
    block = layers.state_bytes() + 36 * 8192 * 2 * (3 + 4)
    assert layers.slot_bytes(4) == 5 * block
    assert layers.slot_bytes(0) == layers.state_bytes() + 36 * 8192 * 2 * 3


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Qwen3-Next-80B-A3B", {"linear_num_value_heads": None}, "linear_num_value_heads"),
        ("Qwen3-Next-80B-A3B", {"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype"),
        ("Nemotron-H-56B", {"hybrid_override_pattern": "M*Q"}, "layers are of kind Q"),
        ("Nemotron-H-56B", {"mamba_num_heads": None}, "states of its M layers are not covered"),
        ("Nemotron-H-56B", {"moe_latent_size": 4}, "latent space"),
        ("Kimi-Linear-48B-A3B", {"layer_types": ["sliding_attention", "linear_attention"]},
         "sliding attention beside recurrent"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with refused("--config", value=name, naming=words):
        published(name, **changes)
