"""The byte model's formulas against an independent count: windows walked token by token and
layer by layer over a DRAM that counts what crosses its border and holds real values."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest
from counted_dram import Dram
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.models.byte_model import (
    BY_REFERENCE,
    COPY_SPILLED,
    DIRECT,
    ByteModel,
    Strategy,
    Workload,
)
from nwor_bench.models.shape import Experts, Indexer, Layer, Mla, ModelShape


@dataclass(frozen=True)
class Window:
    """What the simulated strategies see: which drafts were accepted, and sizes in bytes."""

    layers: int
    accepted: tuple[bool, ...]
    cache_size: int
    activation_size: int

    def each(self) -> Iterator[tuple[int, int]]:
        return product(range(self.layers), range(len(self.accepted)))

    def each_accepted(self) -> Iterator[tuple[int, int]]:
        return ((layer, token) for layer, token in self.each() if self.accepted[token])


def run_direct(dram: Dram, window: Window) -> None:
    for layer, token in window.each():
        dram.write(("cache", layer, token), f"new {layer} {token}", window.cache_size)


def run_copy_spilled(dram: Dram, window: Window) -> None:
    for layer, token in window.each():
        dram.write(("staging", layer, token), f"new {layer} {token}", window.activation_size)
    for layer, token in window.each_accepted():
        value = dram.read(("staging", layer, token), window.activation_size)
        dram.write(("cache", layer, token), value, window.cache_size)


def run_reference(dram: Dram, window: Window) -> None:
    for layer, token in window.each():  # the GEMM's output, which stock vLLM has too
        dram.cells["activation", layer, token] = f"new {layer} {token}"
    for layer, token in window.each_accepted():
        value = dram.read(("activation", layer, token), window.activation_size)
        dram.write(("cache", layer, token), value, window.cache_size)


SIMULATED: dict[Strategy, Callable[[Dram, Window], None]] = {
    DIRECT: run_direct,
    COPY_SPILLED: run_copy_spilled,
    BY_REFERENCE: run_reference,
}


def simulate(strategy: Strategy, window: Window) -> Dram:
    """Run one window; what must hold afterwards in the cache is checked here."""
    dram = Dram({("cache", layer, token): "old" for layer, token in window.each()})
    SIMULATED[strategy](dram, window)
    for layer, token in window.each():
        slot = dram.cells["cache", layer, token]
        if window.accepted[token]:
            assert slot == f"new {layer} {token}"
        elif strategy is not DIRECT:
            assert slot == "old"
    return dram


def with_layers(layers: tuple[Layer, ...], **changes: object) -> ModelShape:
    values: dict[str, object] = {
        "model_type": "llama", "hidden": 8, "vocab": 10, "heads": 4, "kv_heads": 2, "head_dim": 2,
        "mlp_width": 16, "dtype": "bfloat16", "weight_bits": 16,
    }  # fmt: skip
    return ModelShape(layers=layers, **{**values, **changes})  # type: ignore[arg-type]


def shape_of(layers: int = 3, **changes: object) -> ModelShape:
    return with_layers((Layer(),) * layers, **changes)


def model_of(shape: ModelShape, cache: int = 16, activation: int = 16) -> ByteModel:
    return ByteModel(shape, cache_bits=cache, weight_bits=16, activation_bits=activation)


BITS = st.sampled_from([8, 16, 32])


@pytest.mark.parametrize("strategy", tuple(SIMULATED), ids=lambda strategy: strategy.label)
@given(
    layers=st.integers(1, 4),
    accepted=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4),
    kv_heads=st.sampled_from([1, 2, 4]),
    cache=BITS,
    activation=BITS,
)
def test_bytes_are_those_of_a_counted_window(
    strategy: Strategy,
    layers: int,
    accepted: list[list[bool]],
    kv_heads: int,
    cache: int,
    activation: int,
) -> None:
    flat = tuple(flag for request in accepted for flag in request)
    elements = 2 * kv_heads * 2  # K and V, heads, head_dim
    dram = simulate(
        strategy, Window(layers, flat, elements * cache // 8, elements * activation // 8)
    )
    model = model_of(shape_of(layers, kv_heads=kv_heads), cache, activation)
    load = Workload(len(accepted), 100, 3, sum(flat) / len(flat))
    moved = model.moved(strategy, load)
    assert moved.read == pytest.approx(dram.read_bytes)
    assert moved.written == pytest.approx(dram.written_bytes)


@given(acceptance=st.floats(0, 1), cache=BITS)
def test_the_most_that_can_be_saved_are_the_rejected_rows(acceptance: float, cache: int) -> None:
    model, load = model_of(shape_of(), cache, 32), Workload(8, 64, 4, acceptance)
    rejected = 32 * (1 - acceptance)
    assert model.most_saved(load) == pytest.approx(rejected * 3 * 8 * cache / 8)


# --- the step around the drafts ---


def test_context_is_read_once_a_layer_and_no_further_than_its_window() -> None:
    layers = (Layer(), Layer(window=5), Layer(window=50), Layer())
    counted = 0
    for _request in range(3):
        for layer in layers:
            for position in range(20):
                distance = 20 - position
                if layer.window is None or distance <= layer.window:
                    counted += 2 * 2 * 2 * 1  # K and V, heads, head_dim, one byte
    model = model_of(with_layers(layers), 8)
    assert model.context_read(Workload(3, 20, 4, 0.5)) == counted


@pytest.mark.parametrize(("count", "per_token", "tokens"), [(4, 2, 1), (4, 2, 2), (5, 2, 3)])
def test_expected_experts_equal_the_mean_over_all_routings(
    count: int, per_token: int, tokens: int
) -> None:
    choices = list(combinations(range(count), per_token))
    routings = list(product(choices, repeat=tokens))
    mean = sum(len(set().union(*routing)) for routing in routings) / len(routings)
    assert Experts(count, per_token, 1).expected_distinct(tokens) == pytest.approx(mean)


def test_dense_weights_are_read_once_with_lm_head_and_the_looked_up_rows() -> None:
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8  # q, k, v, o
    matrices = 3 * (attention + 3 * 8 * 16) + 10 * 8  # gate, up, down; lm_head
    read = model_of(shape_of()).weights_read(Workload(2, 64, 4, 0.5))
    assert read == 2 * (matrices + 2 * 5 * 8)


def test_quantised_weights_leave_lm_head_and_the_embedding_alone() -> None:
    blocks = 3 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16)
    model = ByteModel(shape_of(), cache_bits=16, weight_bits=4, activation_bits=16)
    assert model.weights_read(Workload(1, 64, 1, 0.5)) == blocks / 2 + 2 * (80 + 2 * 8)


def test_expert_weights_are_those_that_the_tokens_touch() -> None:
    experts = Experts(count=4, per_token=2, width=6, shared_width=5)
    shape = with_layers((Layer(), Layer(sparse=True)), experts=experts)
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    touched = 4 * (1 - 0.5**4)  # 2 requests x (1 draft + 1)
    dense, sparse = 3 * 8 * 16, 3 * 8 * (6 * touched + 5) + 8 * 4  # router
    total = 2 * attention + dense + sparse + 10 * 8 + 4 * 8
    assert model_of(shape).weights_read(Workload(2, 64, 1, 0.5)) == pytest.approx(2 * total)


def test_a_step_is_the_sum_of_its_parts() -> None:
    model, load = model_of(shape_of()), Workload(2, 64, 4, 0.5)
    row = 3 * 2 * 2 * 2 * 2
    parts = model.weights_read(load) + model.context_read(load)
    assert model.context_read(load) == 2 * 64 * row
    assert model.step(load) == parts + 2 * row + 8 * row


def test_ranks_share_heads_weights_and_bytes() -> None:
    model = model_of(shape_of(heads=8, kv_heads=2))
    one, two, eight = (Workload(2, 64, 4, 0.5, ranks) for ranks in (1, 2, 8))
    assert model.cache_row(1) == 2 * model.cache_row(2)
    assert model.cache_row(8) == model.cache_row(2)  # at least one KV head a rank
    assert model.weights_read(two) == model.weights_read(one) / 2
    assert model.most_saved(eight) == model.most_saved(one) / 2


def test_a_latent_row_is_the_same_on_every_rank() -> None:
    mla = Mla(q_rank=4, kv_rank=6, rope_dim=2, nope_dim=4, v_dim=4)
    model = model_of(shape_of(mla=mla))
    assert model.cache_row(1) == model.cache_row(4) == 3 * (6 + 2) * 2


@pytest.mark.parametrize(
    ("strategy", "fewest", "most"),
    [
        (DIRECT, 28, 28),
        (COPY_SPILLED, 28 + 1, 28 + 28 + 1),
        (BY_REFERENCE, 1, 28 + 1),
    ],
)
def test_launches(strategy: Strategy, fewest: int, most: int) -> None:
    assert strategy.launches(28) == (fewest, most)


# --- the map ---


def test_indexer_keys_are_in_the_step_and_in_no_strategy() -> None:
    mla = Mla(q_rank=3, kv_rank=6, rope_dim=2, nope_dim=4, v_dim=5)
    dense = ModelShape("deepseek_v3", 8, 10, 4, 4, 2, 16, (Layer(),) * 4, "bfloat16", 16, mla=mla)
    sparse = replace(dense, indexer=Indexer(heads=2, head_dim=128, selected=50, layers=3))
    load = Workload(requests=3, context=70, draft_tokens=4, acceptance=0.25)
    models = [ByteModel(shape, 16, 16, 16) for shape in (dense, sparse)]
    keys = (3 * 70 + 3 * 5) * 3 * 132
    assert [model.indexer_keys_moved(load) for model in models] == [0, keys]
    assert [model.context_read(load) for model in models] == [3 * 4 * 70 * 16, 3 * 4 * 50 * 16]
    weights = 3 * (3 * 2 * 128 + 8 * (128 + 2)) * 2
    change = models[1].step(load) - models[0].step(load)
    assert change == pytest.approx(keys + weights - 3 * 4 * 20 * 16)
    for strategy in tuple(SIMULATED):
        assert models[0].moved(strategy, load) == models[1].moved(strategy, load)
    below = replace(load, context=40)  # everything is selected
    assert models[1].context_read(below) == models[0].context_read(below)
