"""Launches of the gated delta kernels: verify of one layer, one commit for all layers."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from nwor_kernels.commit.plan import alignment_of
from nwor_kernels.gated_delta.kernel import commit_kernel, verify_kernel
from nwor_kernels.gated_delta.records import GatedNorm, RecordRings, WindowInputs, WindowRecords
from nwor_kernels.launch import Launch, Launches
from nwor_kernels.limits import RECORD_ROWS

STATE_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""bfloat16 numbers that add up to one of a state, by the state's dtype."""

UPDATE_PARTS = 3
"""bfloat16 numbers that an update is taken as: all 24 bits, so that a state is rounded once."""

_ELEMENTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}

HEAD_DIMS = (16, 32, 64, 128, 256)
"""Sizes of keys and values that the kernels serve."""

_verify_launches = Launches(verify_kernel, frozenset())


def refusal(
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    window: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> str | None:
    """Why the kernels cannot serve these gated delta nets; None if they can.

    Args:
        key_heads, value_heads, key_dim, value_dim: H, HV, K and V.
        window: T, the drafts and one more.
        dtype: of the convolution's output.
        state_dtype: of the recurrent state.
    """
    if window > RECORD_ROWS:
        return f"windows of {window} tokens; at most {RECORD_ROWS}"
    if value_heads % key_heads:
        return f"{value_heads} value heads are no multiple of {key_heads} key heads"
    for name, dim in (("key", key_dim), ("value", value_dim)):
        if dim not in HEAD_DIMS:
            return f"{name} head size {dim}; must be one of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations in {dtype}; must be bfloat16 or float16"
    if state_dtype not in STATE_PARTS:
        return f"states in {state_dtype}; must be one of {', '.join(map(str, STATE_PARTS))}"
    return None


def verify_window_triton(
    inputs: WindowInputs,
    out: Tensor,
    records: WindowRecords,
    *,
    scale: float,
    norm: GatedNorm | None = None,
    write_states: bool = False,
    rings: RecordRings | None = None,
) -> None:
    """`verify_window_reference` in one launch; never waits, safe in a CUDA graph.

    The last axis of every tensor must be contiguous, and the last two of outputs and gate. Call it
    only for what `refusal` lets pass.
    """
    state, state_indices = inputs.state, inputs.state_indices
    value_heads, value_dim, key_dim = state.shape[1:]
    key_heads, window = records.k.shape[2], rings.window if rings else records.u.shape[1]
    rows = value_dim if norm else min(value_dim, 64)
    tokens = 8 if window <= 8 else 16
    wide = state.dtype is torch.float32
    options = {"num_warps": 4, "num_stages": 4 if wide else 3}
    if wide and norm and not write_states:
        options["maxnreg"] = 128  # room for four programs; one that writes states needs more
    gate, weight = (norm.gate, norm.weight) if norm else (None, None)
    strided = (*inputs[:3], out, state_indices, out if gate is None else gate)
    constants = {
        "STRIDES": tuple(tensor.stride(0) for tensor in strided),
        "STATE_STRIDES": state.stride()[:3],
        "SCALE": scale,
        "EPS": norm.eps if norm else 0.0,
        "SIGMOID": norm is not None and norm.activation == "sigmoid",
        "H": key_heads,
        "HV": value_heads,
        "K": key_dim,
        "V": value_dim,
        "T": window,
        "COLUMNS": state_indices.shape[1],
        "TOKENS": tokens,
        "ROWS": rows,
        "KEYS": min(key_dim, 16 if wide else 64),
        "PARTS": STATE_PARTS[state.dtype],
        "DOT": _dot_precision(inputs.mixed),
        "WRITES_STATES": write_states,
    }
    grid = (value_dim // rows, value_heads, state_indices.shape[0])
    held = rings[:2] if rings else (None, None)
    arguments = (*inputs, out, *records, gate, weight, *held)
    _verify_launches(grid, arguments, constants, **options)


class StateCommit:
    """`commit_states_reference` in one launch for all layers.

    It holds addresses: keep states, slots and records alive and in place while it is used.
    Building it waits for a copy to the device, so build it outside any graph capture.

    Args:
        states: one tensor a layer, [slots, HV, V, K], the last axis contiguous; all of one dtype,
            shape of a slot and strides.
        groups: each layer's entry of `state_indices`: its KV-cache group.
        state_indices: one tensor a group, [>= requests, >= T] int32, the last axis contiguous.
        records: of all layers, as `verify_window_triton` wrote them.
        rings: of these records, if verify had them.

    Raises:
        ValueError: layers that one launch cannot serve.
    """

    def __init__(
        self,
        states: Sequence[Tensor],
        groups: Sequence[int],
        state_indices: Sequence[Tensor],
        records: WindowRecords,
        rings: RecordRings | None = None,
    ):
        layouts = {(s.dtype, s.device, s.stride(), s.shape[1:]) for s in states}
        if len(layouts) != 1 or states[0].stride(3) != 1:
            raise ValueError(
                "states must share dtype, device, strides and shape, with a contiguous last axis: "
                f"{layouts}"
            )
        if not len(states) == len(groups) == len(records.u):
            raise ValueError(
                f"{len(states)} states, {len(groups)} groups and records of {len(records.u)} "
                "layers: one of each a layer"
            )
        for table in state_indices:
            if table.dtype is not torch.int32 or table.stride(1) != 1:
                raise ValueError(
                    f"state_indices must be int32 rows, got {table.dtype}, strides {table.stride()}"
                )
        self._kept = (states, state_indices, records, rings)
        tables = [(t.data_ptr(), t.stride(0), t.shape[1]) for t in state_indices]
        rows = [(s.data_ptr(), *tables[group]) for s, group in zip(states, groups, strict=True)]
        self._layers = torch.tensor(rows, dtype=torch.int64, device=states[0].device)
        self._launches: dict[int, Callable[..., None]] = {}

    def __call__(self, accepted: Tensor, committed: Tensor, room: int | None = None) -> None:
        """Commit; never waits, safe in a CUDA graph.

        Args:
            accepted: [>= requests] int32 on the device, as the window's verify had it.
            committed: [requests] int32 on the device.
            room: with rings, rows that the next window needs (see the reference).
        """
        requests = len(committed)
        launch = self._launches.get(requests)
        if launch is None:
            launch = self._launches[requests] = self._bind(requests)
        launch(accepted, committed, requests, room)

    def _bind(self, requests: int) -> Callable[..., None]:
        states, _, records, rings = self._kept
        state = states[0]
        value_heads, value_dim, key_dim = state.shape[1:]
        rows = min(value_dim, 64 if state.dtype is torch.float32 else 32)
        constants = {
            "STATE_STRIDES": state.stride()[:3],
            "STATE_ELEMENT": _ELEMENTS[state.dtype],
            "STATE_ALIGNMENT": alignment_of(one.data_ptr() for one in states),
            "H": records.k.shape[3],
            "HV": value_heads,
            "K": key_dim,
            "V": value_dim,
            "T": records.u.shape[2],
            "REQUESTS": records.u.shape[1],
            "ROWS": rows,
            "PARTS": UPDATE_PARTS,
            "DOT": _dot_precision(records.k),
        }
        each = min(requests, 4) if rings else requests  # most rings have room: nothing is to do
        grid = (value_dim // rows, each, len(states) * value_heads)
        launch = Launch(commit_kernel, grid, constants, num_warps=4, num_stages=1)
        return partial(launch, self._layers, *records, *(rings[:2] if rings else (None, None)))


def _dot_precision(vectors: Tensor) -> str:
    """How 16-bit vectors are multiplied exactly: float16 fits tf32, whose exponents are longer."""
    if not vectors.is_cuda:
        return "ieee"
    return "bf16" if vectors.dtype is torch.bfloat16 else "tf32"
