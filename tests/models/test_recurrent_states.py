"""Recurrent states' bytes against windows walked token by token over a DRAM that counts bytes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from counted_dram import Dram
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.config_json import KNOWN_TYPES, read_shape
from nwor_bench.models.recurrent import RecurrentLayers, RecurrentState
from nwor_bench.models.shape import ModelShape

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def published(name: str, **changes: Any) -> ModelShape:
    return read_shape({**config_of(name), **changes}, "--config", name)


def recurrent(name: str, **changes: Any) -> RecurrentLayers:
    found = published(name, **changes).recurrent
    assert found is not None
    return found


def run_stock(dram: Dram, elements: int, size: int, tokens: list[int]) -> None:
    """Every token adds its number to each element, and its state is stored."""
    state = [dram.read(("committed", n), size) for n in range(elements)]
    for place, token in enumerate(tokens):
        state = [value + token for value in state]
        for n, value in enumerate(state):
            dram.write((place, n), value, size)


def run_staged(dram: Dram, elements: int, size: int, tokens: list[int], accepted: int) -> None:
    """Records of all tokens (3 bytes each) by one look at the state; one state by another."""
    for n in range(elements):
        dram.read(("committed", n), size)
    for place, token in enumerate(tokens):
        dram.write(("record", place), token, 3)
    kept = sum(dram.read(("record", place), 3) for place in range(1 + accepted))
    for n in range(elements):
        dram.write((accepted, n), dram.read(("committed", n), size) + kept, size)


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    requests=st.integers(1, 3),
    layers=st.integers(1, 2),
    drafts=st.integers(1, 6),
    wide=st.booleans(),
    data=st.data(),
)
def test_bytes_are_those_of_windows_walked_by_hand(
    shape: tuple[int, ...], requests: int, layers: int, drafts: int, wide: bool, data: Any
) -> None:
    heads, rows, columns = shape
    bits = 32 if wide else 16
    state = RecurrentState("toy", heads, rows, columns, 5, 4, bits, 16, 0, record_bits=24)
    elements = heads * rows * columns
    accepted = data.draw(st.lists(st.integers(0, drafts), min_size=requests, max_size=requests))
    moved = {"stock": [0, 0], "staged": [0, 0]}
    for committed in accepted * layers:
        tokens, size = list(range(1, drafts + 2)), bits // 8
        drams = {way: Dram({("committed", n): 7 * n for n in range(elements)}) for way in moved}
        run_stock(drams["stock"], elements, size, tokens)
        run_staged(drams["staged"], elements, size, tokens, committed)
        for way, dram in drams.items():
            read_next = [dram.cells[committed, n] for n in range(elements)]
            assert read_next == [7 * n + sum(tokens[: committed + 1]) for n in range(elements)]
            moved[way][0] += dram.read_bytes + (4 - 1) * 5 * 2
            moved[way][1] += dram.written_bytes + (4 - 1 + drafts) * 5 * 2
    all_layers = RecurrentLayers(layers, state)
    stock, staged = (
        all_layers.moved(requests, drafts),
        all_layers.staged(requests, drafts, sum(accepted)),
    )
    assert [stock.read, stock.written] == pytest.approx(moved["stock"])
    assert [staged.read, staged.written] == pytest.approx(moved["staged"])


def test_qwen3_nexts_states_in_float32_are_75_mb_a_request_and_draft() -> None:
    wide = recurrent("Qwen3-Next-80B-A3B", mamba_ssm_dtype="float32")
    assert wide.state_bytes() == 36 * 32 * 128 * 128 * 4 == 75_497_472
    one_more = wide.moved(1, 5).written
    columns = wide.count * wide.state.conv_column_bytes()
    assert one_more - wide.moved(1, 4).written == 75_497_472 + columns
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


@pytest.mark.parametrize(
    ("name", "size"),
    [
        # u of each value head and g in float32; k of each key head in bfloat16
        ("Qwen3-Next-80B-A3B", 32 * 128 * 4 + 32 * 4 + 16 * 128 * 2),
        # vLLM's RecoverSSM: [heads, tokens, 128] in float32 and [heads, tokens, 256] in bfloat16
        ("Kimi-Linear-48B-A3B", 32 * 128 * 4 + 32 * 256 * 2),
        # vLLM's ReplaySSM: x and B in bfloat16, dt in float32
        ("Nemotron-H-56B", 256 * 64 * 2 + 8 * 256 * 2 + 256 * 4),
    ],
)
def test_records_of_one_token(name: str, size: int) -> None:
    layers = recurrent(name)
    assert layers.state.record_bits == 8 * size
    more, fewer = (layers.staged(1, drafts, 2) for drafts in (5, 4))
    column = layers.state.conv_column_bytes()
    assert more.written - fewer.written == layers.count * (size + column)


@pytest.mark.parametrize(
    ("name", "drafts", "rows"),
    [("Qwen3.5-27B", 4, 16), ("Qwen3.5-27B", 15, 16), ("Qwen3.5-27B", 16, 0),
     ("Kimi-Linear-48B-A3B", 4, 0), ("Nemotron-H-56B", 4, 0)],
)  # fmt: skip
def test_bytes_of_a_requests_ring_of_records(name: str, drafts: int, rows: int) -> None:
    """A request has no ring if its windows are too long, or its states are not staged."""
    layers = recurrent(name)
    assert layers.ring_bytes(drafts) == layers.count * rows * layers.state.record_bits / 8
    assert layers.ring_bytes(drafts, ranks=2) == layers.ring_bytes(drafts) / 2


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("drafts", [1, 4, 8])
def test_states_are_written_when_a_ring_is_full(drafts: int, chance: float) -> None:
    """Windows of one request over a ring of 16 rows, one after the other; each draft behind an
    accepted one is accepted by chance."""
    layers, draw, windows = recurrent("Qwen3.5-27B"), random.Random(drafts), 20_000
    state, record = layers.state_bytes(), layers.record_bytes()
    read = written = 0.0
    live = accepted = 0
    for _ in range(windows):
        read += state + live * record
        written += (drafts + 1) * record
        kept = next((n for n in range(drafts) if draw.random() > chance), drafts)
        accepted, live = accepted + kept, live + 1 + kept
        if live + drafts + 1 > 16:  # the next window does not fit
            read, written, live = read + state + live * record, written + state, 0
    column = layers.count * layers.state.conv_column_bytes()
    told = layers.with_rings(1, drafts, accepted / windows)
    assert told.read == pytest.approx(read / windows + 3 * column, rel=0.02)
    assert told.written == pytest.approx(written / windows + (3 + drafts) * column, rel=0.05)


def test_ranks_share_the_heads() -> None:
    layers = recurrent("Qwen3.5-27B")
    assert layers.staged(1, 4, 2, ranks=4).total == layers.staged(1, 4, 2).total / 4
    assert layers.moved(1, 4, ranks=4).total == layers.moved(1, 4).total / 4
    assert published("Qwen3.5-27B").fits_ranks(4)
    assert not published("Qwen3-Next-80B-A3B", linear_num_value_heads=6).fits_ranks(4)


def test_a_step_holds_the_states_and_kv_of_attending_layers_only() -> None:
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
