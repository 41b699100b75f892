"""Generated weights for models without weights, with which attention matters.

vLLM's dummy loader draws every weight from +-0.001. Activations are then so small that rounding to
bf16 removes all that attention adds, and no check of the K/V cache could see a fault. This loader
fills the same parameters so that a row attends to itself with about a sixth of its attention at
1,000 tokens of context, no layer's rows become alike, and K and V stay below 10 (an fp8 cache with
scale 1 holds 448).

It is a loader because vLLM packs, splits and quantises weights right after loading.
"""

import logging
import zlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

logger = logging.getLogger("vllm.nwor_bench")

NWOR_LOAD_FORMAT = "nwor_dummy"
"""vLLM's `load_format` for these values; `engine_config` writes it for pairs without weights."""

FACTS = "nwor_dummy_weights"
"""Attribute of a filled model: how many parameters got which values."""

OWN_SCORE = 5.5
"""q.k / sqrt(head_dim) of a row with itself; of two unlike rows it is normal with deviation 1.

exp(5.5) is 245 beside 1,000 rows of exp(0.5) on average: 13 % of the attention in theory,
16 % measured over 28 layers, because the norm of a row varies.
"""

RECURRENT = ("A", "A_log", "D", "dt_bias")
"""Parameters of recurrent layers whose sign and size carry meaning: left as vLLM drew them."""

CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale")


@register_model_loader(NWOR_LOAD_FORMAT)
class FilledDummyLoader(DummyModelLoader):
    """vLLM's dummy loader, then the values of this module."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill `model` in place; what was done is kept as its attribute `FACTS`."""
        super().load_weights(model, model_config)
        # A drafter of the target's shape is another model, not the target once more.
        setattr(model, FACTS, fill(model, "draft" if model_config.runner == "draft" else ""))
        logger.info("nwor: generated weights: %s", getattr(model, FACTS))


def fill(model: nn.Module, role: str = "") -> dict[str, int]:
    """Fill every parameter of a model, in place.

    A value depends on `role`, the parameter's name, its shape and, if the parameter is
    sharded, the tensor-parallel rank: every start gives the same model.

    Returns:
        How many parameters got which kind of value: "matrices", "norms", "zeros", "scales" and
        "left_alone" (not floating point, quantised, recurrent, or of an unknown role).
    """
    counts = Counter(dict.fromkeys(("matrices", "norms", "zeros", "scales", "left_alone"), 0))
    done: set[int] = set()  # an output head may be tied to the embedding
    with torch.no_grad():
        for path, module in model.named_modules(prefix=role):
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in done:
                    counts[_fill_one(path, module, name, parameter.data)] += 1
                    done.add(id(parameter))
    return dict(counts)


def facts_of(runner: Any) -> dict[str, Any] | None:
    """Counts of filled parameters of target and drafter; None if weights were loaded."""
    drafting = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    target = getattr(getattr(runner, "model", None), FACTS, None)
    drafter = getattr(getattr(drafting, "model", None), FACTS, None)
    if target is None and drafter is None:
        return None
    return {"generator": NWOR_LOAD_FORMAT, "target": target, "drafter": drafter}


def _fill_one(path: str, module: nn.Module, name: str, weight: Tensor) -> str:
    if weight.is_meta or not weight.is_floating_point() or torch.finfo(weight.dtype).bits < 16:
        return "left_alone"
    if name in CACHE_SCALES:
        weight.fill_(1.0)
        return "scales"
    if name in RECURRENT or "conv" in path.rpartition(".")[2] or "scale" in name:
        return "left_alone"
    if "bias" in name:
        weight.zero_()
        return "zeros"
    if weight.dim() == 1:
        return _fill_norm(path, module, name, weight)
    if weight.dim() > 3:
        return "left_alone"
    generator = torch.Generator(device=weight.device).manual_seed(_seed(path, module, name, weight))
    weight.normal_(0.0, _inputs(module, weight) ** -0.5, generator=generator)
    if isinstance(module, QKVParallelLinear):
        heads = module.num_heads, module.num_kv_heads
        lean_queries_on_keys(weight, *heads, module.head_size, module.v_head_size)
    return "matrices"


def _fill_norm(path: str, module: nn.Module, name: str, weight: Tensor) -> str:
    """Factors of 1, of random sign in a model's last norm; Gemma's norms multiply by 1 + weight.

    Without the signs a model whose output head is its embedding answers each token with itself.
    """
    if name != "weight":
        return "left_alone"
    weight.fill_(1.0)
    if path.rpartition(".")[2] == "norm":
        generator = torch.Generator(weight.device).manual_seed(_seed(path, module, name, weight))
        weight.copy_(torch.empty_like(weight).bernoulli_(0.5, generator=generator) * 2 - 1)
    if isinstance(module, GemmaRMSNorm):
        weight.sub_(1.0)
    return "norms"


def lean_queries_on_keys(
    weight: Tensor, heads: int, kv_heads: int, head_dim: int, value_dim: int
) -> None:
    """Turn each query head towards its key head, so that a row's own score is `OWN_SCORE`.

    Args:
        weight: [(heads + kv_heads) * head_dim + values, inputs], normal with one deviation;
            the query rows are changed in place. Nothing is done if the rows are laid out in
            another way (for example with an output gate beside each query head).
        heads: query heads of this rank.
        kv_heads: key heads of this rank.
        head_dim: rows of a query or key head.
        value_dim: rows of a value head.
    """
    rows = (heads + kv_heads) * head_dim + kv_heads * value_dim
    if weight.shape[0] != rows or heads % kv_heads:
        return
    share = min(0.95, OWN_SCORE / head_dim**0.5)
    queries = weight[: heads * head_dim].view(kv_heads, heads // kv_heads, head_dim, -1)
    keys = weight[heads * head_dim : (heads + kv_heads) * head_dim]
    queries.mul_((1 - share**2) ** 0.5).add_(keys.view(kv_heads, 1, head_dim, -1), alpha=share)


def _inputs(module: nn.Module, weight: Tensor) -> int:
    if isinstance(module, RowParallelLinear):
        return int(module.input_size)
    return weight.shape[-1]


def _seed(path: str, module: nn.Module, name: str, weight: Tensor) -> int:
    """Embeddings and output heads of one shape are alike, as vLLM shares them with a drafter."""
    rank = getattr(module, "tp_rank", 0) if getattr(module, "tp_size", 1) > 1 else 0
    if isinstance(module, VocabParallelEmbedding):
        path = "vocabulary"
    return zlib.crc32(f"{path}.{name}:{tuple(weight.shape)}:{rank}".encode())
