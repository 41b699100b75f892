"""Windows of Qwen3-Next's gated delta nets: our verifies and commit, and vLLM's kernels.

A call does all layers. Ours verifies each layer without a state write and commits all in one
launch; vLLM's kernels write the state after every token. Its CUDA kernel, Qwen3.5's, has the gated
norm in it: `nwor_norm` does the same work.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nwor_bench.microbench import peers
from nwor_bench.microbench.cases import NETS, OURS, PEER, Group, Nets, Shape, net_bytes
from nwor_bench.microbench.rows import Call, Implementation, Implementations, with_peers
from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton
from nwor_kernels.gated_delta.records import GatedNorm, allocate_records
from nwor_kernels.gated_delta.reference import verify_window_reference

STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

OUT_TOLERANCE = 2e-2
"""Largest error of an output over the largest value: roundings to bfloat16."""

STATE_TOLERANCE = {"f32": 1e-6, "bf16": 1e-2}
"""Of a state; a bfloat16 state is rounded once."""


def gated_delta_implementations(
    group: Group, shape: Shape, device: torch.device, seed: int
) -> Implementations:
    """Ours with and without the gated norm, mode control, and vLLM's two kernels."""
    inputs = NetInputs(group, NETS, device, seed)
    others: dict[str, Callable[[], Implementation]] = {
        "control": partial(inputs.implementation, "control", inputs.control),
        PEER["gated_delta"]: partial(inputs.implementation, PEER["gated_delta"], inputs.triton),
        "nwor_norm": partial(inputs.implementation, "nwor_norm", inputs.ours, inputs.norm),
        "vllm_cuda": partial(inputs.implementation, "vllm_cuda", inputs.cuda, inputs.norm),
    }
    return with_peers(inputs.implementation(OURS, inputs.ours), others)


class NetInputs:
    """One window in all layers; every request reads its state from a random slot of its own."""

    def __init__(self, group: Group, nets: Nets, device: torch.device, seed: int):
        generator = torch.Generator(device=device).manual_seed(seed)
        requests, self.window = group.window.requests, group.window.drafts + 1
        self.group, self.nets, tokens = group, nets, requests * self.window
        heads = (tokens, nets.value_heads)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        self.mixed = random(nets.layers, tokens, nets.width).bfloat16()
        self.a, self.b = (random(nets.layers, *heads).bfloat16() for _ in range(2))
        self.decay = random(nets.layers, nets.value_heads).sigmoid().mul(2).log()
        self.bias = random(nets.layers, nets.value_heads).bfloat16()
        gate, weight = random(*heads, nets.value_dim).bfloat16(), random(nets.value_dim)
        self.norm = GatedNorm(gate, weight.bfloat16(), 1e-6)
        slots = torch.randperm(tokens, generator=generator, device=device).int() + 1
        self.table = slots.view(requests, self.window)
        self.accepted, self.committed = (
            torch.randint(1, self.window + 1, (requests,), generator=generator, device=device).int()
            for _ in range(2)
        )
        self.starts = torch.arange(requests + 1, device=device).int() * self.window
        sizes = (tokens + 1, nets.value_heads, nets.value_dim, nets.key_dim)
        dtype = STATE_DTYPES[group.cache_dtype]
        self.states = [
            torch.empty(sizes, dtype=dtype, device=device).normal_(generator=generator)
            for _ in range(nets.layers)
        ]
        self.out = torch.empty(*heads, nets.value_dim, dtype=torch.bfloat16, device=device)
        self.records = allocate_records(
            layers=nets.layers, requests=requests, window=self.window, key_heads=nets.key_heads,
            value_heads=nets.value_heads, key_dim=nets.key_dim, value_dim=nets.value_dim,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        self._first = self.states[-1].clone()

    def implementation(
        self, name: str, bind: Callable[[GatedNorm | None], Call], norm: GatedNorm | None = None
    ) -> Implementation:
        """A bound call of all layers, checked in the last one. L2 is cold when a round starts."""
        stages, calls = name.startswith(OURS), [bind(norm)]
        copies = name == PEER["gated_delta"]
        return Implementation(
            name,
            self.nets.layers * (1 + copies) + stages,
            net_bytes(self.group, self.nets, states_written=1 if stages else self.window),
            calls,
            partial(self._check, calls, norm, stages),
        )

    def ours(self, norm: GatedNorm | None) -> Call:
        """A verify of each layer, and one commit."""
        commit = StateCommit(self.states, [0] * self.nets.layers, [self.table], self.records)
        verifies = [self._verify(layer, norm) for layer in range(self.nets.layers)]

        def run() -> None:
            for verify in verifies:
                verify()
            commit(self.accepted, self.committed)

        return run

    def control(self, norm: GatedNorm | None) -> Call:
        """A verify of each layer that writes every state."""
        return _in_turn([self._verify(each, norm, True) for each in range(self.nets.layers)])

    def triton(self, norm: GatedNorm | None) -> Call:
        """vLLM's Triton kernel, given q, k and v in tensors of their own."""
        return _in_turn(
            [
                peers.bind_delta_rule(self._layer(each), self.out, self.nets.key_heads)
                for each in range(self.nets.layers)
            ]
        )

    def cuda(self, norm: GatedNorm | None) -> Call:
        """vLLM's CUDA kernel."""
        assert norm is not None
        return _in_turn(
            [
                peers.bind_fused_delta_rule(self._layer(each), self.out, norm)
                for each in range(self.nets.layers)
            ]
        )

    def _layer(self, layer: int) -> dict[str, Any]:
        """The inputs of a verify."""
        return {
            "mixed": self.mixed[layer],
            "a": self.a[layer],
            "b": self.b[layer],
            "A_log": self.decay[layer],
            "dt_bias": self.bias[layer],
            "state": self.states[layer],
            "state_indices": self.table,
            "accepted": self.accepted,
            "query_start_loc": self.starts,
        }

    def _verify(self, layer: int, norm: GatedNorm | None, write_states: bool = False) -> Call:
        return partial(
            verify_window_triton, **self._layer(layer), out=self.out,
            records=self.records.layer(layer), scale=self.nets.key_dim**-0.5, norm=norm,
            write_states=write_states,
        )  # fmt: skip

    def _check(self, calls: list[Call], norm: GatedNorm | None, stages: bool) -> str:
        """The fault in outputs or states of the last layer, or an empty string."""
        state, out = self._first.clone(), torch.empty_like(self.out)
        verify_window_reference(
            **{**self._layer(-1), "state": state}, out=out, records=self.records.layer(-1),
            scale=self.nets.key_dim**-0.5, norm=norm, write_states=True,
        )  # fmt: skip
        self.states[-1].copy_(self._first)
        for each in (self.out, *self.records):
            each.fill_(float("nan"))
        calls[0]()
        slots = self.table.long()
        if stages:
            slots = slots.gather(1, self.committed[:, None].long() - 1)
        slots = slots.flatten()
        bound = STATE_TOLERANCE[self.group.cache_dtype]
        error = _error(self.states[-1][slots], state[slots])
        if not error <= bound:
            return f"states are off by {error:.1e} of the largest value; at most {bound:.0e}"
        error = _error(self.out, out)
        return "" if error <= OUT_TOLERANCE else f"outputs are off by {error:.1e}"


def _in_turn(calls: list[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value; NaN if there is one."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
