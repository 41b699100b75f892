"""Random windows of gated delta nets on NaN-poisoned pages, and their float64 definition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from kernel_inputs import INTERPRETED, generator, to_device
from torch import Tensor

from nwor_kernels.gated_delta.records import (
    GatedNorm,
    WindowInputs,
    WindowRecords,
    allocate_records,
)
from nwor_kernels.gated_delta.reference import commit_states_reference, verify_window_reference

NAN = float("nan")

MARGIN = 16
"""Elements of a page before and after its state."""


class Kernels(NamedTuple):
    """An implementation of both kernels, with the arguments of the references."""

    verify: Any
    commit: Any
    device: torch.device


REFERENCE = Kernels(verify_window_reference, commit_states_reference, torch.device("cpu"))


@pytest.fixture(scope="module")
def kernels(on_triton: torch.device | None) -> Kernels:
    """The references, then the Triton kernels."""
    if not on_triton:
        return REFERENCE
    from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton

    def commit(*given: Any) -> None:
        StateCommit(*given[:5])(*given[5:])

    return Kernels(verify_window_triton, commit, on_triton)


@dataclass(frozen=True)
class Shape:
    """Heads and head sizes of the gated delta nets."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 64

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass
class Case:
    """One window in all layers. Only the slots that it reads hold numbers, and the null slot."""

    shape: Shape
    lengths: list[int]
    window: int
    groups: list[int]
    mixed: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    pages: Tensor
    states: list[Tensor]
    tables: list[Tensor]
    accepted: Tensor
    starts: Tensor
    norm: GatedNorm

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def layer_inputs(self, layer: int) -> WindowInputs:
        """What a layer's verify reads."""
        return WindowInputs(
            *(each[layer] for each in (self.mixed, self.a, self.b, self.A_log, self.dt_bias)),
            *(self.states[layer], self.tables[self.groups[layer]], self.accepted, self.starts),
        )

    def nan_out(self, dtype: torch.dtype) -> Tensor:
        """Poisoned outputs, with rows past the window's tokens."""
        shape = (len(self.mixed[0]), self.shape.value_heads, self.shape.value_dim)
        return torch.full(shape, NAN, dtype=dtype, device=self.mixed.device)

    def nan_records(self) -> WindowRecords:
        """Poisoned records, with rows past the batch's."""
        made = allocate_records(
            (len(self.states), len(self.lengths) + 2, self.window),
            key_heads=self.shape.key_heads,
            value_heads=self.shape.value_heads,
            key_dim=self.shape.key_dim,
            value_dim=self.shape.value_dim,
            dtype=self.mixed.dtype,
            device=self.mixed.device,
        )
        return WindowRecords(*(each.fill_(NAN) for each in made))

    def to_device(self, device: torch.device) -> "Case":
        """A copy whose tensors are on a device, the states views of the copied pages."""
        moved = {
            name: to_device(each, device)
            for name, each in vars(self).items()
            if isinstance(each, Tensor)
        }
        pages = moved["pages"]
        states = [
            torch.as_strided(pages, s.shape, s.stride(), s.storage_offset()) for s in self.states
        ]
        tables = [to_device(table, device) for table in self.tables]
        norm = self.norm._replace(
            gate=to_device(self.norm.gate, device), weight=self.norm.weight.to(device)
        )
        changed = {"states": states, "tables": tables, "norm": norm}
        return Case(**{**vars(self), **moved, **changed})


def make_case(
    seed: int,
    lengths: Sequence[int],
    window: int,
    *,
    shape: Shape = Shape(),
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    groups: Sequence[int] = (0,),
    null_rows: Sequence[int] = (),
    holes: Sequence[int] = (),
    accepted: Sequence[int] | None = None,
    swapped: bool = False,
) -> Case:
    """A random case; rows of length 0 are padding and have null slots.

    Args:
        groups: each layer's KV-cache group.
        null_rows: rows whose slots are null although they have tokens.
        holes: rows with one null slot, not the one that is read.
        accepted: tokens that the window before left, 1 to `window`; None: random.
        swapped: states as vLLM's CPU kernels keep them, [slots, HV, K, V] in memory.
    """
    rng = generator(seed)
    requests, layers, tokens = len(lengths), len(groups), sum(lengths) + 3
    heads = shape.value_heads
    wide = torch.randn(layers, tokens, shape.width + 8, generator=rng).to(dtype)
    gates = torch.randn(2, layers, tokens, heads + 4, generator=rng).to(dtype)
    if accepted is None:
        accepted = torch.randint(1, window + 1, (requests,), generator=rng).tolist()
    tables = []
    for _ in range(max(groups) + 1):
        slots = torch.randperm(requests * window, generator=rng) + 1
        table = torch.full((requests + 1, window + 2), -7, dtype=torch.int32)
        table[:requests, :window] = slots.view(requests, window)
        table[[row for row in range(requests) if not lengths[row] or row in null_rows]] = 0
        for row in holes:
            table[row, accepted[row] % window] = 0
        tables.append(table[:requests, :window])
    numel = heads * shape.value_dim * shape.key_dim
    pages = torch.full((layers, requests * window + 1, numel + 2 * MARGIN), NAN, dtype=state_dtype)
    pages[:, 0] = 0.5
    states = []
    for layer, group in enumerate(groups):
        flat = pages[layer, :, MARGIN:-MARGIN].unflatten(
            1, (heads, shape.key_dim, shape.value_dim) if swapped else
            (heads, shape.value_dim, shape.key_dim),
        )  # fmt: skip
        state = flat.transpose(-1, -2) if swapped else flat
        for row in range(requests):
            slot = int(tables[group][row, accepted[row] - 1])
            if slot > 0:
                random = torch.randn(state.shape[1:], generator=rng)
                state[slot] = random.to(state_dtype)
        states.append(state)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    gate = torch.randn(tokens, heads + 1, shape.value_dim, generator=rng).to(dtype)[:, 1:]
    weight = (1 + 0.1 * torch.randn(shape.value_dim, generator=rng)).to(dtype)
    return Case(
        shape=shape,
        lengths=list(lengths),
        window=window,
        groups=list(groups),
        mixed=wide[..., 8:],
        a=gates[0, ..., 4:],
        b=gates[1, ..., 4:],
        A_log=(0.01 + 2 * torch.rand(layers, heads, generator=rng)).log(),
        dt_bias=(0.5 * torch.randn(layers, heads, generator=rng)).to(dtype),
        pages=pages,
        states=states,
        tables=tables,
        accepted=torch.tensor(accepted, dtype=torch.int32),
        starts=starts,
        norm=GatedNorm(gate, weight, 1e-6),
    )


def definition(case: Case, layer: int) -> tuple[Tensor, list[list[Tensor]]]:
    """In float64, token by token: outputs [tokens, HV, V], 0 for null rows, and each row's states.

    A row's list has the state [HV, V, K] before its first token, then after each token.
    """
    shape, wide = case.shape, torch.float64
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    q, k, v = torch.split(case.mixed[layer].to(wide), [keys, keys, values], dim=-1)
    q, k = (
        (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            shape.value_heads // shape.key_heads, dim=1
        )
        for each in (part.reshape(-1, shape.key_heads, shape.key_dim) for part in (q, k))
    )
    v = v.reshape(-1, shape.value_heads, shape.value_dim)
    x = case.a[layer].to(wide) + case.dt_bias[layer].to(wide)
    decay = (-case.A_log[layer].to(wide).exp() * torch.log1p(x.exp())).exp()
    beta = 1 / (1 + (-case.b[layer].to(wide)).exp())
    outputs = torch.zeros(case.tokens, shape.value_heads, shape.value_dim, dtype=wide)
    table, states = case.tables[case.groups[layer]], []
    for row, length in enumerate(case.lengths):
        slot = int(table[row, int(case.accepted[row]) - 1])
        chain = [case.states[layer][slot].to(wide)] if slot > 0 else []
        for at in range(int(case.starts[row]), int(case.starts[row]) + length if chain else 0):
            state = decay[at][:, None, None] * chain[-1]
            seen = (state * k[at][:, None, :]).sum(-1)
            update = beta[at][:, None] * (v[at] - seen)
            chain.append(state + update[:, :, None] * k[at][:, None, :])
            outputs[at] = (chain[-1] * q[at][:, None, :]).sum(-1) * shape.scale
        states.append(chain)
    return outputs, states


def gated(outputs: Tensor, norm: GatedNorm, dtype: torch.dtype) -> Tensor:
    """The gated RMS norm of outputs rounded to `dtype`, in float64."""
    gate, weight = norm.gate[: len(outputs)].cpu().double(), norm.weight.cpu().double()
    rounded = outputs.cpu().to(dtype).double()
    root = (rounded.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    activated = 1 / (1 + (-gate).exp()) * (1 if norm.activation == "sigmoid" else gate)
    return rounded / root * weight * activated


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value; NaN is infinite."""
    gap = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    return float(gap.nan_to_num(nan=float("inf")))


def assert_rounded(found: Tensor, wanted: Tensor, part: float = 1e-6) -> None:
    """`found` is `wanted` (float64): within a `part` of its largest value, or one rounding."""
    slack = part * float(wanted.abs().max())
    step = 0.0 if found.dtype is torch.float32 else torch.finfo(found.dtype).eps / 2
    if INTERPRETED and found.dtype is torch.bfloat16:
        step *= 2  # Triton's interpreter truncates
    gap = (found.double() - wanted).abs()
    assert bool((gap <= slack + step * (wanted.abs() + slack)).all()), float(gap.max())
