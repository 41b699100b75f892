"""`WindowStates` without vLLM, over plain torch kernels: what it commits and leaves to stock."""

from collections.abc import Sequence
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nwor_bench.plugin.layers import StagingUnavailable
from nwor_bench.plugin.state_layers import StateLayer, strange_spec
from nwor_bench.plugin.states import (
    StateKernels,
    StateTables,
    WindowStates,
    reference_commit,
)
from nwor_bench.plugin.window import Window, WindowBatch
from nwor_kernels.gated_delta.records import GatedNorm, WindowInputs
from nwor_kernels.gated_delta.reference import verify_window_reference

HEADS, KEYS, VALUES, KEY_HEADS = 4, 8, 6, 2
LENGTH, SLOTS = 3, 20
KERNELS = StateKernels(verify_window_reference, reference_commit, lambda states: [])


class NoStaging:
    """K/V of no layer."""

    num_layers = 0

    def reset(self) -> None: ...

    def stage(self, *_: Any) -> str:
        return ""

    def commit(self, *_: Any) -> str:
        return ""

    def write_directly(self, *_: Any) -> None: ...


class Pieces:
    """Three layers in two groups, and a window of two requests."""

    def __init__(self, seed: int = 0, requests: int = 2):
        self.random = torch.Generator().manual_seed(seed)
        self.window = Window(NoStaging())
        self.layers = [self._layer(number, group) for number, group in enumerate((0, 0, 1))]
        sizes: dict[str, Any] = {"length": LENGTH, "requests": requests, "dtype": torch.float32}
        self.states = WindowStates(self.layers, self.window, kernels=KERNELS, **sizes)
        assert self.states.allocate() is None
        slots = torch.randperm(SLOTS - 1, generator=self.random)[: 4 * LENGTH] + 1
        self.indices = slots.view(2, 2, LENGTH).int()  # of each group and request
        self.accepted = torch.tensor([2, 1], dtype=torch.int32)
        self.given = [self._inputs() for _ in self.layers]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def _layer(self, number: int, group: int) -> StateLayer:
        own = SimpleNamespace(
            A_log=self._draw(HEADS), dt_bias=self._draw(HEADS), head_k_dim=KEYS,
            num_k_heads=KEY_HEADS, tp_size=1,
        )  # fmt: skip
        return StateLayer(f"net.{number}", own, group, self._draw(SLOTS, HEADS, VALUES, KEYS))

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        tokens = 2 * LENGTH
        channels = 2 * KEY_HEADS * KEYS + HEADS * VALUES
        return self._draw(tokens, channels), self._draw(tokens, HEADS), self._draw(tokens, HEADS)

    def metadata(self, group: int, **changes: Any) -> Any:
        """vLLM's of a step of nothing but windows."""
        return SimpleNamespace(**{
            "spec_sequence_masks": torch.ones(2, dtype=torch.bool), "num_prefills": 0,
            "num_decodes": 0, "num_spec_decodes": 2, "num_accepted_tokens": self.accepted,
            "spec_state_indices_tensor": self.indices[group],
            "spec_query_start_loc": torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
        } | changes)  # fmt: skip

    def begin(self, control: bool = False, repeats: bool = False) -> None:
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = WindowBatch((2, 2), nothing, nothing, nothing)
        self.window.begin(batch, control=control, repeats=repeats)

    def verify(self, *numbers: int) -> list[Tensor]:
        """Let these layers verify, in this order; their outputs."""
        outputs = []
        for number in numbers:
            metadata = self.metadata(self.layers[number].group)
            assert self.states.stages(metadata)
            out = torch.full((2 * LENGTH, HEADS, VALUES), float("nan"))
            self.states.verify(number, *self.given[number], metadata, out)
            outputs.append(out)
        return outputs

    def by_reference(
        self, number: int, mixed: Tensor | None = None, norm: GatedNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """A layer's output in this window, and its states as stock leaves them: one a token."""
        layer = self.layers[number]
        state, own, metadata = layer.state.clone(), layer.layer, self.metadata(layer.group)
        assert self.states._records is not None
        records = self.states._records.layer(number)
        kept = type(records)(*(part[:, :LENGTH].clone() for part in records))
        given, a, b = self.given[number]
        inputs = WindowInputs(
            given if mixed is None else mixed, a, b, own.A_log, own.dt_bias, state,
            metadata.spec_state_indices_tensor, self.accepted, metadata.spec_query_start_loc,
        )  # fmt: skip
        out = torch.zeros(2 * LENGTH, HEADS, VALUES)
        more: dict[str, Any] = {"scale": KEYS**-0.5, "norm": norm, "write_states": True}
        verify_window_reference(inputs, out, kept, **more)
        return out, state

    def as_stock(self, number: int) -> Tensor:
        """The layer's states as stock leaves them."""
        return self.by_reference(number)[1]


COUNTS = torch.tensor([3, 1], dtype=torch.int32)


def check_committed(
    pieces: Pieces, before: list[Tensor], stock: list[Tensor], layers: Sequence[int] = (0, 1, 2)
) -> None:
    """One slot a request has stock's state in these layers, and no other slot has changed."""
    for number, (layer, old) in enumerate(zip(pieces.layers, before, strict=True)):
        table = pieces.indices[layer.group]
        slots = [int(table[row, count - 1]) for row, count in enumerate(COUNTS)]
        slots = slots if number in layers else []
        ours, theirs = layer.state[slots], stock[number][slots]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        others = [slot for slot in range(SLOTS) if slot not in slots]
        assert torch.equal(layer.state[others], old[others])


def check_commit(
    pieces: Pieces, reason: str | None = None, layers: Sequence[int] = (0, 1, 2)
) -> None:
    """The commit writes these layers' states, once."""
    before = [layer.state.clone() for layer in pieces.layers]
    stock = [pieces.as_stock(number) for number in range(3)]
    assert pieces.states.commit(COUNTS) == (len(layers), reason)
    check_committed(pieces, before, stock, layers)
    assert pieces.states.commit(COUNTS).layers == 0


@pytest.fixture
def pieces() -> Pieces:
    return Pieces()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_one_state_a_request_is_written_in_each_layer(
    pieces: Pieces, order: tuple[int, ...]
) -> None:
    """Whatever the order in which the forward meets the layers: groups are not in it."""
    before = [layer.state.clone() for layer in pieces.layers]
    pieces.begin()
    pieces.verify(*order)
    assert all(torch.equal(x.state, y) for x, y in zip(pieces.layers, before, strict=True))
    check_commit(pieces)


def test_a_second_step_is_committed_by_its_own_tables(pieces: Pieces) -> None:
    for step in range(3):
        if step == 2:  # vLLM fills the same buffers anew
            pieces.indices[:] = pieces.indices.flip(1)
            pieces.accepted[:] = torch.tensor([1, 3])
        pieces.begin()
        pieces.verify(0, 1, 2)
        check_commit(pieces)
        pieces.window.forget()


def test_a_request_without_a_token_keeps_the_state_behind_its_first(pieces: Pieces) -> None:
    pieces.begin()
    pieces.verify(0, 1, 2)
    stock = pieces.as_stock(0)
    pieces.states.commit(torch.tensor([0, 3], dtype=torch.int32))
    first = int(pieces.indices[0, 0, 0])
    torch.testing.assert_close(pieces.layers[0].state[first], stock[first], rtol=1e-5, atol=1e-6)


def test_layers_that_staged_before_the_window_fell_back_are_committed(pieces: Pieces) -> None:
    pieces.begin()
    pieces.verify(0, 2)
    pieces.window.abort("stage:planted")
    assert not pieces.states.stages(pieces.metadata(0))  # stock serves the others
    check_commit(pieces, layers=(0, 2))


def test_the_trace_sees_windows(pieces: Pieces) -> None:
    seen: list[int] = []
    pieces.states.trace = SimpleNamespace(verified=lambda number, mixed, out: seen.append(number))
    pieces.begin()
    pieces.verify(0, 1, 2)
    assert seen == [0, 1, 2]


def test_control_writes_every_state_and_commits_none(pieces: Pieces) -> None:
    stock = [pieces.as_stock(number) for number in range(3)]
    pieces.begin(control=True)
    pieces.verify(0, 1, 2)
    assert pieces.states.commit(COUNTS) == (0, None)
    for layer, theirs in zip(pieces.layers, stock, strict=True):
        torch.testing.assert_close(layer.state, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_prefills": 1}, "beside_prefill"),
        ({"num_decodes": 1}, "beside_prefill"),
        ({"spec_sequence_masks": None}, "states:no_window"),
        ({"num_spec_decodes": 3}, "states:more_requests_than_records"),
    ],
)
def test_steps_that_stock_serves(pieces: Pieces, changes: dict[str, Any], reason: str) -> None:
    assert not pieces.states.stages(pieces.metadata(0))  # no window is open
    pieces.begin()
    assert not pieces.states.stages(pieces.metadata(0, **changes))
    assert pieces.states.commit(COUNTS) == (0, reason)
    pieces.window.forget()
    pieces.begin()  # the next one is staged again
    pieces.verify(0, 1, 2)
    assert pieces.states.commit(COUNTS) == (3, None)


def as_vllms(pieces: Pieces, **more: Any) -> Any:
    """Metadata as a dataclass, as vLLM's are, with `more` fields that are None by default."""
    own = vars(pieces.metadata(0))
    kind = make_dataclass("Metadata", [*own, *((name, Any, None) for name in more)])
    return kind(**own, **more)


@pytest.mark.parametrize(
    ("metadata", "arguments", "reason"),
    [
        ({}, (), None),
        ({"ring_cursors": None}, (), None),  # of a kernel that is not selected
        ({"ring_cursors": torch.zeros(2)}, (), "unsupported_states:metadata_ring_cursors"),
        ({"ring_base": 0}, (), "unsupported_states:metadata_ring_base"),
        ({}, ("ring",), "unsupported_states:argument_ring"),
    ],
)
def test_a_stock_kernel_that_is_not_known_is_left_to_stock_by_name(
    pieces: Pieces, metadata: dict[str, Any], arguments: tuple[str, ...], reason: str | None
) -> None:
    """A ring of stock's: the state in the slot is older than the window."""
    pieces.begin()
    assert pieces.states.stages(as_vllms(pieces, **metadata), arguments) is (reason is None)
    assert pieces.states.commit(COUNTS) == (0, reason or "states:not_called")


@pytest.mark.parametrize(
    ("tensors", "drafts", "reason"),
    [(2, 4, None), (5, 4, "5_tensors"), (2, 0, "1_slots"), (5, 0, "5_tensors")],
)
def test_states_that_are_kept_otherwise_are_left_to_stock_by_name(
    tensors: int, drafts: int, reason: str | None
) -> None:
    spec = SimpleNamespace(shapes=((4, 3),) * tensors, num_speculative_blocks=drafts)
    assert strange_spec(spec, 4) == (reason and f"unsupported_states:{reason}")


def test_a_staged_window_whose_layers_were_not_called_says_so(pieces: Pieces) -> None:
    pieces.begin()
    assert pieces.states.commit(COUNTS) == (0, "states:not_called")


def test_a_captured_window_is_committed_from_its_tables(pieces: Pieces) -> None:
    pieces.begin(repeats=True)
    pieces.verify(0, 1, 2)
    pieces.verify(0, 1, 2)  # the warm-up, and the capture
    tables = pieces.states.captured()
    assert isinstance(tables, StateTables)
    assert [each.data_ptr() for each in tables.indices] == [x.data_ptr() for x in pieces.indices]
    pieces.states.drop()
    pieces.window.forget()
    pieces.begin()
    pieces.states.replayed(tables)  # the records hold the last run's
    check_commit(pieces)


def test_a_graph_captured_from_stock_commits_nothing(pieces: Pieces) -> None:
    pieces.begin(repeats=True)
    assert not pieces.states.stages(pieces.metadata(0, num_spec_decodes=3))
    reason = pieces.states.captured()
    pieces.states.drop()
    pieces.window.forget()
    pieces.begin()
    pieces.states.replayed(reason)
    assert pieces.states.commit(COUNTS) == (0, "states:more_requests_than_records")


@pytest.mark.parametrize("warm_up", [(), (0, 1, 2)])
def test_a_capture_in_which_some_layers_staged_is_refused(
    pieces: Pieces, warm_up: tuple[int, ...]
) -> None:
    pieces.begin(repeats=True)
    pieces.verify(*warm_up)
    pieces.verify(0)
    with pytest.raises(StagingUnavailable, match="states:not_called"):
        pieces.states.captured()


def test_a_commit_that_fails_is_done_in_plain_torch(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces.begin()
    pieces.verify(0, 1, 2)
    broken = KERNELS._replace(commit=lambda *_: 1 / 0)
    monkeypatch.setattr(pieces.states, "_kernels", broken)
    check_commit(pieces, "commit:states:ZeroDivisionError")


def test_without_memory_or_kernel_stock_keeps_the_states(pieces: Pieces) -> None:
    states = WindowStates(
        pieces.layers, pieces.window, length=LENGTH, requests=2, dtype=torch.float32,
        kernels=KERNELS._replace(verify=lambda *_, **__: 1 / 0),
    )  # fmt: skip
    assert states.allocate() == "states:ZeroDivisionError"
    assert states.allocate() == states.unavailable == "states:ZeroDivisionError"
    pieces.begin()
    assert not states.stages(pieces.metadata(0))
    assert states.commit(COUNTS) == (0, None)


def test_a_window_of_a_step_that_died_is_dropped(pieces: Pieces) -> None:
    pieces.begin()
    pieces.verify(0, 1)
    pieces.states.drop()
    pieces.window.abort("step_not_finished")
    pieces.window.close()
    pieces.begin()
    pieces.verify(0, 1, 2)
    check_commit(pieces)


def test_bytes_of_states_and_records(pieces: Pieces) -> None:
    one = HEADS * VALUES * KEYS * 4
    assert pieces.states.bytes_per_request == 3 * one
    token = 4 * (KEY_HEADS * KEYS + HEADS * VALUES + HEADS)
    assert pieces.states.token_bytes == 3 * token
    records = pieces.states._records
    assert records is not None
    assert pieces.states.record_bytes == sum(part.numel() * 4 for part in records)
