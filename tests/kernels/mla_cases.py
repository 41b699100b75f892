"""Random steps of MLA attention: latent rows in a paged cache, and the slow definition."""

from dataclasses import dataclass

import numpy as np
import torch
from attention_cases import (
    Request,
    Staged,
    Step,
    as_e4m3_cache,
    check_rows,
    committed_only,
    longest,
    make_step,
)
from attention_cases import stage_step as stage_kv
from kernel_inputs import generator
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep, Scales, ScoreRules, StepRequests
from nwor_kernels.fp8 import quantize_e4m3


@dataclass
class MlaStep:
    """One step of an engine; `rows[r]` [tokens, latent + pe] are request r's, rounded."""

    paged: Step
    query: Tensor
    latent_dim: int
    rows: list[Tensor]
    cache: Tensor
    staged: Staged
    k_scale: Tensor | None = None
    q_scale: Tensor | None = None

    @property
    def requests(self) -> list[Request]:
        return self.paged.requests

    @property
    def scale(self) -> float:
        return 0.8 * self.query.shape[2] ** -0.5


def make_mla_step(
    requests: list[Request],
    *,
    heads: int = 4,
    latent_dim: int = 32,
    pe_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    whole: bool = True,
    seed: int = 0,
) -> MlaStep:
    """A step whose cache is NaN wherever no committed row lies; padding queries are NaN."""
    width = latent_dim + pe_dim
    paged = make_step(
        requests, heads=1, kv_heads=1, head_dim=width // 2, block_size=block_size, dtype=dtype,
        seed=seed,
    )  # fmt: skip
    query = torch.randn(len(paged.query), heads, width, generator=generator(seed + 1)).to(dtype)
    query[paged.owned_rows :] = float("nan")
    staged = stage_kv(paged, whole)
    rows = [torch.cat(both, dim=-1)[:, 0] for both in zip(paged.key, paged.value, strict=True)]
    return MlaStep(paged, query, latent_dim, rows, committed_only(paged, staged)[:, 0], staged)


def quantise(step: MlaStep, k_scale: float, q_scale: float | None, exactly: bool) -> MlaStep:
    """The step with an fp8 cache, and fp8 queries if `q_scale` is given.

    `exactly`: staged rows are numbers that e4m3 holds, so that nothing is left to round.
    """
    scale = torch.tensor([k_scale])
    dtype = step.rows[0].dtype
    step.rows = [_read_back(rows, scale) for rows in step.rows]
    if exactly:
        step.staged.key, step.staged.value = (
            _read_back(half.flatten(1), scale).to(dtype).unsqueeze(1)
            for half in (step.staged.key, step.staged.value)
        )
    cache = step.cache.unsqueeze(1)
    step.cache = as_e4m3_cache(cache, Scales(None, scale, scale))[:, 0]
    step.k_scale = scale
    if q_scale is not None:
        step.q_scale = torch.tensor([q_scale])
        step.query = quantize_e4m3(step.query, step.q_scale)
    return step


def attend_slowly(step: MlaStep) -> np.ndarray:
    """MLA attention from its definition in float64, one query row and head at a time."""
    query = step.query.double().numpy() * (1.0 if step.q_scale is None else float(step.q_scale))
    output = np.full((*query.shape[:2], step.latent_dim), np.nan)
    for r, request in enumerate(step.requests):
        keys = step.rows[r].double().numpy()
        for q in range(request.queries):
            row, seen = int(step.paged.query_start_loc[r]) + q, request.cached + q + 1
            for h in range(query.shape[1]):
                scores = keys[:seen] @ query[row, h] * step.scale
                weights = np.exp(scores - scores.max())
                output[row, h] = weights / weights.sum() @ keys[:seen, : step.latent_dim]
    return output


def arguments(
    step: MlaStep,
    device: torch.device | str = "cpu",
    *,
    cache: Tensor | None = None,
    split_query: bool = True,
    dtype: torch.dtype | None = None,
    max_query_len: int | None = None,
) -> AttentionStep:
    """What the kernels are given; the output is NaN.

    `split_query`: the two parts of queries are tensors of their own; `dtype`: of the output.
    """
    usual = torch.bfloat16 if step.query.dtype == torch.float8_e4m3fn else step.query.dtype
    shape = (*step.query.shape[:2], step.latent_dim)
    query, latent = step.query.to(device), step.latent_dim
    parts = [query[..., :latent], query[..., latent:]]
    if split_query:
        parts = [part.contiguous() for part in parts]
    staged = torch.cat([step.staged.key, step.staged.value], dim=-1).to(device)
    paged, bounds = step.paged, (step.staged.start, step.staged.end)
    requests = (paged.query_start_loc, paged.seq_lens, paged.block_table, *bounds)
    return AttentionStep(
        parts[0],
        staged[..., :latent],
        staged[..., latent:],
        (step.cache if cache is None else cache).to(device),
        StepRequests(*(each.to(device) for each in requests)),
        torch.full(shape, float("nan"), dtype=dtype or usual, device=device),
        ScoreRules(step.scale),
        max_query_len or longest(paged),
        int(paged.seq_lens.max()),
        Scales(*(None if s is None else s.to(device) for s in (step.q_scale, step.k_scale))),
        parts[1],
    )


def run(kernel, step: MlaStep, device="cpu", *told, **how) -> Tensor:
    """The output on the host, NaN where nothing was written; `told`: what the kernel takes more."""
    given = arguments(step, device, **how)
    kernel(given, *told)
    return given.output.cpu()


def check(step: MlaStep, result: Tensor, expected: Tensor | np.ndarray, tolerance: float) -> None:
    """`check_rows` of any step."""
    check_rows(step.paged, result, expected, tolerance)


def _read_back(rows: Tensor, scale: Tensor) -> Tensor:
    return quantize_e4m3(rows.unsqueeze(1), scale).squeeze(1).double() * scale.double()
