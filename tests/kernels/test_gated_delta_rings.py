"""Rings of records over many windows of requests that come and go: against float64.

Every cached state but those in use, every row of a ring that is not live and every output hold NaN.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import examples
from gated_delta_cases import (
    NAN,
    REFERENCE,
    Case,
    Kernels,
    Shape,
    assert_rounded,
    definition,
    gated,
    largest_error,
    make_case,
)
from gated_delta_cases import kernels as kernels  # a fixture
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import IN_TRITON, INTERPRETED, SEEDS, assert_same, generator
from torch import Tensor

pytest.importorskip("triton")

from nwor_kernels.gated_delta.records import RecordRings, allocate_records
from nwor_kernels.limits import RECORD_ROWS

SMALL = Shape(1, 2, 16, 32)
REQUESTS, GROUPS = 3, (1, 0)

SLACK = 4e-6
"""Error of a float32 state behind a full ring over its largest value."""


DRIFT = {torch.float32: 0.0, torch.bfloat16: 1.2e-2}
"""What roundings of states add up to in 2,000 tokens, as in `test_gated_delta.py`."""


class Engine:
    """Requests with one slot and one ring each, number i in ring i + 1; a few run in each window.

    Args:
        kernels: verify and commit, with the arguments of the references.
    """

    def __init__(self, kernels: Kernels, seed: int, window: int, **options: Any):
        self.verify, self.commit, self.device = kernels
        self.window, self.seed = window, seed
        self.rng = generator(seed)
        self.shape: Shape = options.get("shape", SMALL)
        self.dtype: torch.dtype = options.get("dtype", torch.bfloat16)
        self.norm: str | None = options.get("norm")
        self.lasting: bool = options.get("lasting", False)
        """Requests never end, and their exact states are not set to what is cached."""
        shape = self.shape
        state_dtype = options.get("state_dtype", torch.float32)
        self.drift = DRIFT[state_dtype] if self.lasting else 0.0
        sizes = (len(GROUPS), REQUESTS + 1, shape.value_heads, shape.value_dim, shape.key_dim)
        self.states = torch.full(sizes, NAN, dtype=state_dtype, device=self.device)
        self.exact = torch.zeros(sizes, dtype=torch.float64)
        self.slots = [torch.randperm(REQUESTS, generator=self.rng) + 1 for _ in GROUPS]
        heads = {"key_heads": shape.key_heads, "value_heads": shape.value_heads}
        widths = {"key_dim": shape.key_dim, "value_dim": shape.value_dim}
        rows = len(GROUPS), REQUESTS + 1, RECORD_ROWS
        more = {"dtype": self.dtype, "device": self.device}
        self.records = allocate_records(rows, **heads, **widths, **more)
        for part in self.records:
            part.fill_(NAN)
        self.cursors = torch.zeros(REQUESTS + 1, 2, dtype=torch.int32, device=self.device)
        self.plain: Case
        self.rows: list[int | None] = []
        self.live, self.written, self.deepest = [0] * REQUESTS, 0, 0
        self.worst_output = self.worst_state = 0.0
        for request in range(REQUESTS):
            self.join(request)

    def pick(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.rng))

    def join(self, request: int) -> None:
        """A new request takes this one's place: its ring's rows stay, its cursor is zeroed."""
        self.cursors[request + 1] = 0
        self.live[request] = 0
        for layer, group in enumerate(GROUPS):
            state = torch.randn(self.states.shape[2:], generator=self.rng).to(self.states.dtype)
            self.states[layer, self.slots[group][request]] = state.to(self.device)
            self.exact[layer, request] = state.double()

    def run(self, windows: int) -> "Engine":
        for _ in range(windows):
            rows = [r for r in torch.randperm(REQUESTS, generator=self.rng).tolist() if
                    self.pick(0, 5)]  # fmt: skip
            self.step(rows)
            if not self.pick(0, 7):
                self.make_current(rows)
            if not (self.lasting or self.pick(0, 5)):
                self.join(self.pick(0, REQUESTS - 1))
        return self

    def step(self, rows: list[int]) -> None:
        """One window of these requests, between rows of padding and tokens without a ring."""
        lengths = [self.pick(1, self.window) if not self.pick(0, 3) else self.window for _ in rows]
        lengths, self.rows = [*lengths, 0, min(2, self.window)], [*rows, None, None]
        case = self.case(lengths)
        rings = RecordRings(self.of_row(), self.cursors, self.window)
        chains = [self.check_outputs(case, layer, rings) for layer in range(len(GROUPS))]
        drawn = [self.pick(0, length) for length in lengths]
        for row, request in enumerate(rows):
            self.live[request] += drawn[row]
            for layer, chain in enumerate(chains):
                self.exact[layer, request] = chain[row][drawn[row]]
            for part in self.records:
                part[:, request + 1, self.live[request] :] = NAN  # rejected, and all behind
        self.check_commit(case, rings, drawn, self.window)

    def make_current(self, rows: list[int]) -> None:
        """Stock is about to read these rows' states."""
        self.rows = list(rows)
        rings = RecordRings(self.of_row(), self.cursors, self.window)
        self.cursors[:, 1] = self.cursors[:, 0]
        self.check_commit(self.case([1] * len(rows)), rings, [0] * len(rows), RECORD_ROWS)

    def of_row(self) -> Tensor:
        found = [0 if request is None else request + 1 for request in self.rows]
        return torch.tensor([*found, 0], dtype=torch.int32, device=self.device)

    def case(self, lengths: list[int]) -> Case:
        """Inputs of a window, whose states are the engine's."""
        self.seed += 1
        made = make_case(self.seed, lengths, self.window, shape=self.shape, dtype=self.dtype,
                         groups=GROUPS)  # fmt: skip
        made.A_log[:, ::2] -= 4.0  # half of the heads forget slowly, so that old rows count
        places = [[0 if r is None else int(slots[r]) for r in self.rows] for slots in self.slots]
        tables = [torch.tensor(p, dtype=torch.int32)[:, None].repeat(1, self.window).contiguous()
                  for p in places]  # fmt: skip
        self.plain, moved = made, made.to_device(self.device)
        tables = [table.to(self.device) for table in tables]
        return replace(moved, states=list(self.states), tables=tables)

    def check_outputs(self, case: Case, layer: int, rings: RecordRings) -> list[list[Tensor]]:
        """Verify one layer; its exact states before each row's first token and behind each."""
        before = self.states.clone(), [part.clone() for part in self.records]
        norm = case.norm._replace(activation=self.norm) if self.norm else None
        out = case.nan_out(torch.float32)
        options = {"scale": self.shape.scale, "norm": norm, "rings": rings}
        self.verify(case.layer_inputs(layer), out, self.records.layer(layer), **options)
        own = [0 if request is None else request + 1 for request in self.rows]
        exact = torch.cat([torch.zeros_like(self.exact[:, :1]), self.exact], 1)
        exact[:, 0], table = NAN, torch.tensor(own)[:, None].expand(-1, self.window)
        known = replace(self.plain, states=list(exact), tables=[table] * 2)
        wanted, chains = definition(known, layer)
        tokens = case.tokens - case.lengths[-1]
        assert bool(out[case.tokens :].isnan().all()), "outputs of padding were written"
        assert not bool(out[tokens : case.tokens].any()), "tokens without a ring have outputs"
        if tokens:
            expected = gated(wanted, norm, torch.float32) if norm else wanted
            error = largest_error(out[:tokens].cpu(), expected[:tokens].cpu())
            self.worst_output = max(self.worst_output, error)
            assert error < 1e-5 + self.drift
        assert_same(self.states, before[0])
        mine = torch.zeros(REQUESTS + 1, RECORD_ROWS, dtype=torch.bool)
        for request, length in zip(self.rows, case.lengths, strict=True):
            if request is not None:
                self.deepest = max(self.deepest, self.live[request])
                mine[request + 1, self.live[request] : self.live[request] + length] = True
        for part, old in zip(self.records, before[1], strict=True):
            assert not bool(part[layer].cpu()[mine].isnan().any()), "a token has no record"
            assert_same(part[layer].cpu()[~mine], old[layer].cpu()[~mine])
        return chains

    def check_commit(self, case: Case, rings: RecordRings, counts: list[int], room: int) -> None:
        """Commit: only the states of rings without room are written, and rightly."""
        before = self.states.clone()
        committed = torch.tensor(counts, dtype=torch.int32, device=self.device)
        given = case.states, case.groups, case.tables, self.records, rings
        self.commit(*given, case.accepted, committed, room)
        for request in self.rows:
            if request is None or self.live[request] + room <= RECORD_ROWS:
                continue
            self.written += self.live[request] > 0
            for layer, group in enumerate(GROUPS):
                slot = self.slots[group][request]
                state = self.states[layer, slot].cpu()
                if self.live[request]:
                    exact = self.exact[layer, request]
                    self.worst_state = max(self.worst_state, largest_error(state, exact))
                    assert_rounded(state, exact, SLACK + self.drift)
                if not self.lasting:
                    self.exact[layer, request] = state.double()  # what is cached from here on
                before[layer, slot] = self.states[layer, slot]
            self.live[request] = 0
        assert_same(self.states, before)
        assert self.cursors[1:, 0].tolist() == self.live


@examples(6)
@pytest.mark.long
@given(
    seed=SEEDS,
    window=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    norm=st.sampled_from([None, "silu", "sigmoid"]),
)
def test_any_windows(kernels, seed, window, dtype, state_dtype, norm):
    Engine(kernels, seed, window, dtype=dtype, state_dtype=state_dtype, norm=norm).run(6)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "shape", "norm"),
    [
        (5, SMALL, "silu"),
        pytest.param(1, SMALL, None, marks=pytest.mark.long),
        pytest.param(16, SMALL, None, marks=pytest.mark.long),
        pytest.param(3, Shape(1, 3, 16, 128), None, marks=pytest.mark.long),  # two programs a head
        pytest.param(9, Shape(2, 2, 64, 16), "sigmoid", marks=pytest.mark.long),
    ],
)
def test_many_windows(kernels, window, shape, norm, state_dtype):
    engine = Engine(kernels, window, window, shape=shape, state_dtype=state_dtype, norm=norm)
    short = INTERPRETED and kernels is not REFERENCE
    engine.run(10 if short else 40)
    assert engine.deepest >= min(3 if short else 7, RECORD_ROWS - window)
    assert engine.written > 0 or (short and window < 5)


@pytest.mark.slow
@pytest.mark.parametrize(  # interpreted it takes minutes
    "on_triton",
    [pytest.param(None, id="reference"), *[IN_TRITON] * (not INTERPRETED)],
    scope="module",
)
@pytest.mark.parametrize(
    "state_dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "shape", [Shape(1, 2, 16, 16), pytest.param(Shape(1, 3, 128, 128), marks=pytest.mark.long)]
)
def test_errors_of_long_outputs(kernels, shape, state_dtype) -> None:
    """About 2,000 tokens a request."""
    engine = Engine(kernels, 4, 5, shape=shape, state_dtype=state_dtype, lasting=True).run(900)
    print(f"\n{shape}, {state_dtype}: outputs off by {engine.worst_output:.2g} of the largest, "
          f"states by {engine.worst_state:.2g}")  # fmt: skip
    assert engine.written > 300


def with_an_empty_ring(kernels, rings: bool) -> tuple[Tensor, ...]:
    case = make_case(3, [5, 3, 5], 5, shape=SMALL, accepted=[1, 1, 1]).to_device(kernels.device)
    out, records = case.nan_out(torch.float32), case.nan_records()
    given = {}
    if rings:
        of_row = torch.tensor([2, 1, 3], dtype=torch.int32, device=kernels.device)
        zeros = torch.zeros(5, 2, dtype=torch.int32, device=kernels.device)
        given["rings"] = RecordRings(of_row, zeros, 5)
        wider = [torch.full((*p.shape[:2], RECORD_ROWS, *p.shape[3:]), NAN).to(p) for p in records]
        records = records._make(wider)
    layer = records.layer(0)
    kernels.verify(case.layer_inputs(0), out, layer, scale=SMALL.scale, norm=case.norm, **given)
    place = torch.tensor([2, 1, 3] if rings else [0, 1, 2], device=kernels.device)
    return out, *(part[place, :3] for part in layer)


def test_an_empty_ring_changes_no_bit(kernels):
    """On a GPU the compiler may add up in another order."""
    for own, other in zip(*(with_an_empty_ring(kernels, r) for r in (False, True)), strict=True):
        if kernels.device.type == "cpu":
            assert_same(own, other)
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5, equal_nan=True)


# --- planted faults ---


def cursor_too_far(engine: Engine) -> None:
    engine.cursors[1:, 0] += engine.cursors[1:, 0] > 0


def flush_skipped(engine: Engine) -> None:
    original = engine.commit

    def commit(states, *rest):
        kept = [state.clone() for state in states]
        original(states, *rest)
        for state, old in zip(states, kept, strict=True):
            state.copy_(old)

    engine.commit = commit


def rejected_row_kept(engine: Engine) -> None:
    original = engine.commit

    def commit(*given):
        *rest, committed, room = given
        original(*rest, committed + 1, room)

    engine.commit = commit


def others_ring(engine: Engine) -> None:
    engine.of_row = lambda: Engine.of_row(engine) % REQUESTS + 1  # type: ignore[method-assign]


def ring_not_zeroed(engine: Engine) -> None:
    def join(request: int) -> None:
        kept = engine.cursors.clone()
        Engine.join(engine, request)
        engine.cursors.copy_(kept)

    engine.join = join  # type: ignore[method-assign]


def run_on(engine: Engine) -> None:
    for _ in range(12):
        engine.join(0)
        engine.step([0, 1, 2])


@pytest.mark.parametrize(
    "plant", [cursor_too_far, flush_skipped, rejected_row_kept, others_ring, ring_not_zeroed]
)
def test_a_fault_is_seen(plant: Callable[[Engine], None]) -> None:
    engine = Engine(REFERENCE, 7, 3).run(2)
    engine.step([0, 1, 2])
    plant(engine)
    with pytest.raises(AssertionError):
        run_on(engine)
