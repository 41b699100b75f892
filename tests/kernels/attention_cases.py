"""Random steps for the attention tests: a paged cache, its tokens, and the slow definition."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from kernel_inputs import generator
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep, Scales, ScoreRules, StepRequests
from nwor_kernels.fp8 import quantize_e4m3


@dataclass(frozen=True)
class Request:
    """`cached` tokens came in earlier steps; of `queries` new ones the last `drafts` are drafts."""

    cached: int
    queries: int
    drafts: int = 0

    @property
    def length(self) -> int:
        return self.cached + self.queries


@dataclass
class Step:
    """One step of an engine, with the K/V of every token known apart from the cache.

    `key[r][t]` and `value[r][t]` are request r's token t, already rounded to the dtype.
    """

    requests: list[Request]
    query: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    block_size: int
    kv_cache: Tensor
    key: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """Not the usual 1 / sqrt(head_dim), which a kernel could take for granted."""
        return 0.8 * self.query.shape[2] ** -0.5

    @property
    def owned_rows(self) -> int:
        """Rows of the batch that belong to a request; padding follows."""
        return int(self.query_start_loc[-1])

    def drafts(self) -> list[tuple[int, int, int]]:
        """(row of the batch, request, position) of every draft token."""
        return [
            (int(self.query_start_loc[r + 1]) - back, r, request.length - back)
            for r, request in enumerate(self.requests)
            for back in range(request.drafts, 0, -1)
        ]

    def slot(self, request: int, position: int) -> tuple[int, int]:
        """(block, offset) of a token."""
        block, offset = divmod(position, self.block_size)
        return int(self.block_table[request, block]), offset


def make_step(
    requests: list[Request],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding_rows: int = 2,
    seed: int = 0,
) -> Step:
    """A step whose blocks lie scattered in the cache; padding rows of the query are NaN.

    `value_dim` None: values are as wide as keys.
    """
    rng = generator(seed)
    starts = np.cumsum([0] + [r.queries for r in requests])
    query = torch.randn(int(starts[-1]) + padding_rows, heads, head_dim, generator=rng).to(dtype)
    query[int(starts[-1]) :] = float("nan")
    per_request = [-(-r.length // block_size) for r in requests]
    num_blocks = sum(per_request) + 3
    scattered = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()
    table = torch.full((len(requests), max(per_request) + 2), num_blocks + 99, dtype=torch.int32)
    # Block numbers past a request's last block are junk in an engine too: never to be followed.
    for r, count in enumerate(per_request):
        table[r, :count] = torch.tensor([scattered.pop() for _ in range(count)])
    width = head_dim + (value_dim or head_dim)
    shape = (num_blocks, kv_heads, block_size, width)
    step = Step(
        requests=requests,
        query=query,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([r.length for r in requests], dtype=torch.int32),
        block_table=table,
        block_size=block_size,
        kv_cache=torch.randn(shape, generator=rng).to(dtype),  # what earlier requests left there
    )
    for r, request in enumerate(requests):
        kv = torch.randn(request.length, kv_heads, width, generator=rng).to(dtype)
        step.key.append(kv[..., :head_dim])
        step.value.append(kv[..., head_dim:])
        for position in range(request.length):
            block, offset = step.slot(r, position)
            step.kv_cache[block, :, offset] = kv[position]
    return step


def staged_rows(step: Step, order: list[int], spare: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, staged key, staged value) of the step's drafts in this order; NaN past them."""
    drafts = [step.drafts()[i] for i in order]
    key, value = (
        torch.full((len(drafts) + spare, *of[0].shape[1:]), float("nan"), dtype=of[0].dtype)
        for of in (step.key, step.value)
    )
    for i, (_, request, position) in enumerate(drafts):
        key[i] = step.key[request][position]
        value[i] = step.value[request][position]
    return torch.tensor([row for row, _, _ in drafts]).long(), key, value


def poison_drafts(step: Step) -> Tensor:
    """The cache with NaN in the drafts' slots, and only there."""
    cache = step.kv_cache.clone()
    for _, request, position in step.drafts():
        block, offset = step.slot(request, position)
        cache[block, :, offset] = float("nan")
    return cache


def attend_slowly(
    step: Step,
    *,
    causal: bool = True,
    sliding_window: int = -1,
    chunk: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> np.ndarray:
    """Attention from its definition in float64, one query row, head and token at a time."""
    query = step.query.double().numpy()
    output = np.full((*query.shape[:2], step.value[0].shape[2]), np.nan)
    heads, ratio = query.shape[1], query.shape[1] // step.key[0].shape[1]
    for r, request in enumerate(step.requests):
        keys, values = step.key[r].double().numpy(), step.value[r].double().numpy()
        for q in range(request.queries):
            position = request.cached + q
            row = int(step.query_start_loc[r]) + q
            seen = [
                t
                for t in range(request.length)
                if (not causal or t <= position)
                and (sliding_window <= 0 or position - t < sliding_window)
                and (chunk <= 0 or t // chunk >= position // chunk)
            ]
            for h in range(heads):
                weights, total = [], 0.0
                for t in seen:
                    score = float(query[row, h] @ keys[t, h // ratio]) * step.scale
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    weights.append(math.exp(score))
                    total += weights[-1]
                if sinks is not None:
                    total += math.exp(float(sinks[h]))
                output[row, h] = sum(
                    w / total * values[t, h // ratio] for w, t in zip(weights, seen, strict=True)
                )
    return output


OPTIONS = {
    "sinks": {"sinks": torch.tensor([1.5, -200.0, 40.0, -3.0, 0.0, 6.0])},
    "chunk": {"chunk": 16},
    "chunk of 3": {"chunk": 3},
    "window and chunk": {"sliding_window": 20, "chunk": 24},
    "all": {
        "sinks": torch.tensor([2.0, 3.0, -1.0, 0.5, 1.0, 0.1]),
        "chunk": 48,
        "softcap": 0.7,
    },
}
"""What a layer may add to plain attention; per-head tensors for up to 6 heads."""


def for_heads(options: dict, heads: int) -> dict:
    """The options with per-head tensors cut to so many heads."""
    return {
        name: value[:heads].contiguous() if isinstance(value, Tensor) else value
        for name, value in options.items()
    }


@dataclass
class Staged:
    """Rows of K/V that are not in the cache, and which of them are whose."""

    key: Tensor
    value: Tensor
    start: Tensor
    end: Tensor


def stage_step(step: Step, whole: bool) -> Staged:
    """K/V rows as slices of a step's fused QKV output, NaN where nothing is staged.

    Staged are each request's drafts or, if `whole`, all query rows of a request with drafts.
    """
    (_, heads, width), value_width = step.key[0].shape, step.value[0].shape[2]
    columns = heads * (2 * width + value_width)
    fused = torch.full((step.query.shape[0], columns), float("nan")).to(step.key[0].dtype)
    key, value = of_fused(fused, heads, width)
    starts, ends = [], []
    for r, request in enumerate(step.requests):
        last = int(step.query_start_loc[r + 1])
        staged = request.queries if whole and request.drafts else request.drafts
        if staged:
            key[last - staged : last] = step.key[r][-staged:]
            value[last - staged : last] = step.value[r][-staged:]
        starts.append(last - staged)
        ends.append(last)
    return Staged(key, value, *(torch.tensor(rows).int() for rows in (starts, ends)))


def of_fused(fused: Tensor, heads: int, width: int) -> tuple[Tensor, ...]:
    """K and V in [rows, columns] of Q, K and V: Q as wide as K, V as wide as what is left."""
    after_key = 2 * heads * width
    key, value = fused[:, after_key // 2 : after_key], fused[:, after_key:]
    return tuple(part.unflatten(1, (heads, -1)) for part in (key, value))


def committed_only(step: Step, staged: Staged) -> Tensor:
    """The cache with NaN wherever no committed token of a request lies: nothing else is read."""
    cache = torch.full_like(step.kv_cache, float("nan"))
    for r, request in enumerate(step.requests):
        for position in range(request.length - int(staged.end[r] - staged.start[r])):
            block, offset = step.slot(r, position)
            cache[block, :, offset] = step.kv_cache[block, :, offset]
    return cache


def arguments(
    step: Step,
    staged: Staged,
    device: torch.device | str = "cpu",
    *,
    cache: Tensor | None = None,
    query: Tensor | None = None,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
    **rules: Any,
) -> AttentionStep:
    """What the kernels are given; the output is NaN, and all K/V but committed and staged ones.

    `cache`, `query`: others than the step's; `dtype`: of the output; `rules` as in `ScoreRules`.
    """
    query = step.query if query is None else query
    usual = torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype
    shape = (*query.shape[:2], staged.value.shape[2])
    key, value = of_fused(staged.key._base.to(device), *staged.key.shape[1:])
    cache = committed_only(step, staged) if cache is None else cache
    requests = (step.query_start_loc, step.seq_lens, step.block_table, staged.start, staged.end)
    sinks = rules.pop("sinks", None)
    return AttentionStep(
        query.to(device),
        key,
        value,
        cache if cache.device == torch.device(device) else cache.to(device),
        StepRequests(*(each.to(device) for each in requests)),
        torch.full(shape, float("nan"), dtype=dtype or usual, device=device),
        ScoreRules(step.scale, sinks=None if sinks is None else sinks.to(device), **rules),
        longest(step),
        int(step.seq_lens.max()),
        Scales(*(None if each is None else each.to(device) for each in scales or Scales())),
    )


def longest(step: Step) -> int:
    """Most query rows of a request that has a window."""
    return max(request.queries for request in step.requests if request.drafts)


def quantised_step(step: Step, scales: Scales) -> tuple[Step, Tensor, Tensor]:
    """(what attention should see, the query to pass, the cache's values in e4m3 bytes).

    The first step's K/V (and query) went through e4m3 and back; its cache did not.
    """
    seen = replace(step, key=[], value=[])
    for name, scale in (("key", scales.key), ("value", scales.value)):
        for rows in getattr(step, name):
            back = quantize_e4m3(rows, scale).double() * scale.double().reshape(1, -1, 1)
            getattr(seen, name).append(back)
    query = step.query
    if scales.query is not None:
        query = quantize_e4m3(step.query, scales.query)
        seen.query = query.double() * scales.query.double()
    return seen, query, as_e4m3_cache(step.kv_cache, scales, step.query.shape[2])


def exact_in_e4m3(step: Step, scales: Scales) -> None:
    """Make K/V numbers that e4m3 holds: the interpreter would round others wrongly."""
    rounded, _, _ = quantised_step(step, scales)
    for name in ("key", "value"):
        setattr(step, name, [rows.to(step.query.dtype) for rows in getattr(rounded, name)])


def as_e4m3_cache(cache: Tensor, scales: Scales, head_dim: int | None = None) -> Tensor:
    """[blocks, kv_heads, block_size, K + V width] uint8 of a cache in another dtype."""
    tokens = cache.transpose(1, 2)
    both = tokens.tensor_split((head_dim or cache.shape[-1] // 2,), dim=-1)
    parts = [
        quantize_e4m3(part.flatten(0, 1), scale).view(torch.uint8)
        for part, scale in zip(both, (scales.key, scales.value), strict=True)
    ]
    return torch.cat(parts, dim=-1).view(tokens.shape).transpose(1, 2).contiguous()


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the norm of the exact result: rounding of operands, weights and output."""

WINDOWS = [Request(37, 5, 4), Request(0, 5, 4), Request(16, 5, 4), Request(130, 5, 4)]
MIXED = [Request(40, 3, 2), Request(9, 21, 0), Request(0, 4, 3), Request(70, 1, 0)]


def check_rows(step: Step, result: Tensor, expected: Tensor | np.ndarray, tolerance: float) -> None:
    """Rows of requests with a window are right; all other rows were left alone."""
    wanted = torch.as_tensor(expected)
    for r, request in enumerate(step.requests):
        rows = slice(*step.query_start_loc[r : r + 2].tolist())
        if not request.drafts:
            assert result[rows].isnan().all()
            continue
        error = (result[rows].double() - wanted[rows]).norm() / wanted[rows].norm()
        assert error < tolerance, f"request {r}: {error:.2e}"
    assert result[step.owned_rows :].isnan().all()


def check_replays(kernel: Any, reference: Any, given: AttentionStep, workspace: Any) -> None:
    """One captured launch, replayed with other lengths: right, and the same bits every time."""
    lens, output = given.requests.seq_lens, given.output
    kernel(given, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(given, workspace)
    for lengths in ([1505, 1505, 1505], [5, 900, 64], [6, 5, 1000]):
        lens.copy_(torch.tensor(lengths))
        expected = torch.full_like(output, float("nan"), dtype=torch.float64)
        reference(given._replace(output=expected), torch.float64)
        seen = []
        for _ in range(50):
            output.fill_(float("nan"))
            graph.replay()
            seen.append(output[:15].clone())
        assert all(torch.equal(seen[0], other) for other in seen)
        error = (seen[0].double() - expected[:15]).norm() / expected[:15].norm()
        assert error < TOLERANCE[torch.bfloat16]
        assert not workspace.arrived.any()
