"""Gated delta windows whose accepted tokens stay in rings, against float64: requests come and go,
sit out windows and change rows; stock reads their states now and then."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gated_delta_cases import Case, Shape, definition, gated, largest_error, make_case
from kernel_inputs import INTERPRETED, assert_same, generator
from test_gated_delta import Kernels
from torch import Tensor

pytest.importorskip("triton")

from nwor_kernels.gated_delta import kernel as triton_kernel
from nwor_kernels.gated_delta import launch, reference
from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton
from nwor_kernels.gated_delta.records import Rings, WindowRecords, allocate_records
from nwor_kernels.gated_delta.reference import behind_records

REQUESTS, GROUPS, B = 3, (1, 0), 16
TINY = Shape(1, 2, 16, 32)
MOST = 8 * 4e-6
"""Allowed error over the largest value, of up to B tokens in float32; measured: at most 1e-6."""


def by_module(module: ModuleType) -> Kernels:
    """The references in this module."""
    return Kernels(
        module.verify_window_reference, module.commit_states_reference, torch.device("cpu")
    )


def by_triton(device: torch.device) -> Kernels:
    def commit(states, groups, tables, accepted, committed, records, rings):
        StateCommit(states, groups, tables, records, rings)(accepted, committed)

    return Kernels(verify_window_triton, commit, device)


@pytest.fixture(scope="module")
def kernels(on_triton):
    return by_triton(on_triton) if on_triton else by_module(reference)


class Engine:
    """Three requests, each with one slot and one ring, in an engine of two layers.

    Slots of nobody, rejected records and those behind them hold NaN.
    """

    def __init__(self, kernels: Kernels, window: int, shape: Shape, dtype: Any, norm: str | None):
        self.kernels, self.window, self.shape, self.norm = kernels, window, shape, norm
        self.rng, device = generator(window), kernels.device
        state = (shape.value_heads, shape.value_dim, shape.key_dim)
        nan = float("nan")
        self.pages = torch.full((2, REQUESTS + 2, *state), nan, dtype=dtype, device=device)
        self.exact = torch.full(self.pages.shape, nan, dtype=torch.float64)
        self.slots = [torch.randperm(REQUESTS, generator=self.rng) + 1 for _ in GROUPS]
        sizes = {"key_heads": shape.key_heads, "value_heads": shape.value_heads,
                 "key_dim": shape.key_dim, "value_dim": shape.value_dim}  # fmt: skip
        made = allocate_records((2, REQUESTS + 1, B), **sizes, dtype=torch.bfloat16, device=device)
        self.records = WindowRecords(*(part.fill_(nan) for part in made))
        numbers = torch.zeros(3, REQUESTS + 1, dtype=torch.int32, device=device)
        self.rings = Rings(*numbers, window)
        self.live = [0] * REQUESTS
        self.written = 0
        for request in range(REQUESTS):
            self.join(request)

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.rng))

    def join(self, request: int) -> None:
        """A new request has this slot and ring: its cursor is reset, nothing else."""
        for layer, group in enumerate(GROUPS):
            slot = self.slots[group][request]
            state = torch.randn(self.pages.shape[2:], generator=self.rng)
            self.pages[layer, slot] = state.to(self.pages)
            self.exact[layer, slot] = self.pages[layer, slot].cpu().double()
        self.rings.before[request + 1] = self.live[request] = 0

    def case(self, order: list[int], lengths: list[int]) -> Case:
        """A window of requests in this order; a row of none is padding, or has no ring."""
        case = make_case(self.draw(0, 2**30), lengths, self.window, shape=self.shape, groups=GROUPS)
        case.A_log[:, ::2] -= 4.0  # half of the heads forget slowly
        for group, table in enumerate(case.tables):
            for row, request in enumerate(order):
                table[row] = self.slots[group][request] if request >= 0 else REQUESTS + 1
        return replace(case, states=list(self.exact))

    def step(self, out_dtype: torch.dtype) -> None:
        """One window of some requests, its commit, and the states and cursors it leaves."""
        order = torch.randperm(REQUESTS, generator=self.rng).tolist()[: self.draw(1, REQUESTS)]
        lengths = [self.draw(1, self.window) if self.draw(0, 1) else self.window for _ in order]
        order, lengths = [*order, -1, -1], [*lengths, self.window, 0]
        exact = self.case(order, lengths)
        case = replace(exact, states=[]).to_device(self.kernels.device)
        case.states = list(self.pages)
        self.rings.of_row[:] = 0
        of_row = torch.tensor(order, dtype=torch.int32) + 1
        rings = self.rings._replace(of_row=of_row.to(self.kernels.device))
        before, chains = self.pages.clone(), []
        norm = case.norm._replace(activation=self.norm) if self.norm else None
        for layer in range(2):
            outputs, states = definition(exact, layer)
            chains.append(states)
            out = case.nan_out(out_dtype)
            self.kernels.verify(
                case.layer_inputs(layer), out, self.records.layer(layer), scale=self.shape.scale,
                norm=norm, rings=rings,
            )  # fmt: skip
            wanted = gated(outputs, norm, out_dtype) if norm else outputs
            bound = 1e-5 if out_dtype is torch.float32 else 2e-2
            wanted[sum(lengths[:-2]) :] = 0.0  # a row without a ring
            assert largest_error(out[: case.tokens].cpu(), wanted) < bound
            assert bool(out[case.tokens :].isnan().all())
        assert_same(self.pages, before)
        counts = [self.draw(0, length) for length in lengths]
        for row, request in enumerate(order[:-2]):
            self.accept(request, counts[row], [states[row] for states in chains])
        self.commit(case.tables, rings, case.accepted, counts)

    def accept(self, request: int, count: int, chains: list[list[Tensor]]) -> None:
        self.live[request] += count
        for layer, group in enumerate(GROUPS):
            self.exact[layer, self.slots[group][request]] = chains[layer][count]
        for part in self.records:
            part[:, request + 1, self.live[request] :] = float("nan")

    def commit(self, tables: Any, rings: Rings, accepted: Tensor, counts: list[int]) -> None:
        """Commit, or with -1 write these rings' states; all that changed is what had to."""
        committed = torch.tensor(counts, dtype=torch.int32, device=self.kernels.device)
        before = self.pages.clone()
        given = list(self.pages), GROUPS, tables, accepted, committed, self.records, rings
        self.kernels.commit(*given)
        forced = [ring - 1 for ring, n in zip(rings.of_row.tolist(), counts, strict=True) if n < 0]
        for request, live in enumerate(self.live):
            if live + self.window > B or (request in forced and live):
                self.live[request] = 0
                self.written += 1
                for layer, group in enumerate(GROUPS):
                    slot = self.slots[group][request]
                    before[layer, slot] = self.pages[layer, slot]
            assert int(self.rings.before[request + 1]) == self.live[request]
            self.check_state(request)
        assert int(self.rings.before[0]) == 0
        assert_same(self.pages, before)

    def check_state(self, request: int) -> None:
        """State and ring together are the exact state, which goes on from a rounded one."""
        own, live = torch.tensor([request + 1]), torch.tensor([self.live[request]])
        for layer, group in enumerate(GROUPS):
            slot = self.slots[group][request]
            records = WindowRecords(*(part[layer].cpu() for part in self.records))
            found = behind_records(self.pages[layer, slot][None].cpu(), records, own, live)[0]
            wanted = self.exact[layer, slot]
            step = 0.0 if self.pages.dtype is torch.float32 else torch.finfo(torch.bfloat16).eps
            largest = wanted.abs().max()
            gap = (found - wanted).abs() - step * (not live) * wanted.abs()
            assert float(gap.max() / largest) < MOST
            if not live:
                self.exact[layer, slot] = found.double()

    def stock_reads(self) -> None:
        """All rings are written; stock reads and writes the states of a request."""
        self.rings.now.copy_(self.rings.before)
        every = torch.arange(REQUESTS + 1, dtype=torch.int32, device=self.kernels.device)
        lies = [
            torch.tensor([0, *slots.tolist()], dtype=torch.int32)[:, None] for slots in self.slots
        ]
        lies = [table.to(self.kernels.device) for table in lies]
        rings, counts = self.rings._replace(of_row=every), [-1] * (REQUESTS + 1)
        self.commit(lies, rings, torch.ones_like(every), counts)
        for layer in range(2):
            assert largest_error(self.pages[layer, 1:-1].cpu(), self.exact[layer, 1:-1]) == 0.0

    def run(self, windows: int) -> "Engine":
        for number in range(windows):
            self.step(torch.float32 if number % 3 else torch.bfloat16)
            if self.draw(0, 5) == 0:
                self.stock_reads()
            if self.draw(0, 6) == 0:
                self.join(self.draw(0, REQUESTS - 1))
        return self


CASES = [
    pytest.param(5, TINY, None, id="5 tokens"),
    pytest.param(3, Shape(2, 4, 16, 32), "silu", id="3 tokens, norm"),
    pytest.param(9, Shape(1, 1, 32, 16), "sigmoid", id="9 tokens, norm"),
    pytest.param(16, TINY, None, id="16 tokens: today's scheme"),
    pytest.param(1, Shape(1, 3, 16, 16), None, id="1 token"),
]


@pytest.mark.parametrize(("window", "shape", "norm"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_of_an_engine(kernels, window, shape, norm, dtype):
    done = Engine(kernels, window, shape, dtype, norm).run(12 if INTERPRETED else 40)
    assert done.written >= (1 if INTERPRETED else 3)


def test_an_empty_ring_gives_todays_bits(kernels):
    case = make_case(3, [5, 3, 5], 5, shape=TINY, groups=(0,)).to_device(kernels.device)
    case.tables[0][:] = case.tables[0][:, :1]
    case.states[0].nan_to_num_(nan=0.25)
    plain, out = case.nan_records(), [case.nan_out(torch.float32) for _ in range(2)]
    options = {"scale": TINY.scale, "norm": case.norm}
    verify, inputs = kernels.verify, case.layer_inputs(0)
    verify(inputs, out[0], plain.layer(0), **options)
    sizes = dict(vars(TINY), dtype=case.mixed.dtype, device=kernels.device)
    records = allocate_records((1, 4, B), **sizes)
    numbers = torch.zeros(3, 4, dtype=torch.int32, device=kernels.device)
    rings = Rings(*numbers, 5)
    rings.of_row[:3] = torch.tensor([2, 1, 3])
    verify(inputs, out[1], records.layer(0), **options, rings=rings)
    assert_same(*out)
    for part, ringed in zip(plain, records, strict=True):
        for row, length in enumerate(case.lengths):
            ring = int(rings.of_row[row])
            assert_same(ringed[0, ring, :length], part[0, row, :length])


def mutated(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with a planted fault."""
    source = Path(module.__file__ or "").read_text()
    assert source.count(old) >= 1, old
    path = folder / "planted.py"
    path.write_text(source.replace(old, new, 1))
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


IN_REFERENCE = {
    "a cursor one too far": ("before[own].long(), slot", "before[own].long() + 1, slot"),
    "a rejected row kept": ("committed.clamp(min=0)\n", "committed.clamp(min=0) + 1\n"),
    "another request's ring": ("own = rings.of_row[:requests].long()\n",
                               "own = rings.of_row[:requests].long().roll(1)\n"),
    "a full ring is not written": ("rings.window > records", "rings.window > 1 + records"),
    "a ring that stock needs is not written": ("(committed < 0) & (live > 0)", "(live < 0)"),
    "a written ring stays live": ("live.where(~full, 0)", "live"),
    "the newest row is forgotten": ("kept = live > token\n", "kept = live > token + 1\n"),
    "records in front of their place": ("live[rows] + token\n", "(live[rows] + token - 1) % 16\n"),
    "the state is not decayed": ("after = current * g[own, token].exp()[..., None, None]",
                                 "after = current"),
    "a row of no ring": ("slot.where(own > 0, 0)", "slot.where(own >= 0, 0)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", IN_REFERENCE)
def test_a_fault_of_the_reference_is_seen(fault, tmp_path):
    planted = mutated(reference, *IN_REFERENCE[fault], tmp_path)
    with pytest.raises((AssertionError, IndexError)):
        Engine(by_module(planted), 5, TINY, torch.float32, None).run(40)


IN_KERNEL = {
    "a cursor one too far": ("tl.load(before + own), B - T)", "tl.load(before + own) + 1, B - T)"),
    "a rejected row kept": ("tl.load(now + own) + tl.m", "tl.load(now + own) + 1 + tl.m"),
    "another request's ring": ("tl.load(rings + request).to", "tl.load(rings + request // 2).to"),
    "a full ring is not written": ("(live + T > B)", "(live + T > B + 1)"),
    "a ring that stock needs is not written": ("(count < 0) & (live > 0)", "(live < 0)"),
    "a written ring stays live": ("tl.where(writes, 0, live)", "live"),
    "the ring does not decay": ("factors *= tl.exp(_decay_since(old_g, row))[:, None]", ""),
    "the state is not decayed": ("w * tl.exp(tl.sum(old_g, 0)) + by_ring", "w + by_ring"),
    "records in front of their place": ("line = own * B + live + token", "line = own * B + token"),
    "the next verify's rows": ("row < live", "row < live + 1"),
    "value heads share a key": ("((old_line * H + head) * K)", "((old_line * H) * K)"),
}


@pytest.mark.triton
@pytest.mark.long
@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are tested by the same mutants")
@pytest.mark.parametrize("fault", IN_KERNEL)
def test_a_fault_of_the_kernel_is_seen(fault, tmp_path, monkeypatch):
    planted = mutated(triton_kernel, *IN_KERNEL[fault], tmp_path)
    monkeypatch.setattr(launch, "commit_kernel", planted.commit_kernel)
    monkeypatch.setattr(
        launch, "_verify_launches", launch.Launches(planted.verify_kernel, frozenset())
    )
    with pytest.raises(AssertionError):
        Engine(by_triton(torch.device("cpu")), 5, Shape(2, 4, 16, 16), torch.float32, None).run(14)
