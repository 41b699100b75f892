"""Values of models without weights: who gets which, and how much attention a row has of itself."""

import math

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from nwor_bench.engine import arguments as engine_config
from nwor_bench.plugin import dummy_weights
from nwor_bench.plugin.dummy_weights import fill, lean_queries_on_keys

pytestmark = pytest.mark.slow  # vLLM's layers are imported


def drawn(*shape: int) -> nn.Parameter:
    """What vLLM's own dummy loader leaves."""
    return nn.Parameter(torch.empty(shape).uniform_(-1e-3, 1e-3))


def holder(**values: torch.Tensor | int) -> nn.Module:
    """A module with these parameters and attributes."""
    made = nn.Module()
    for name, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        setattr(made, name, nn.Parameter(value, requires_grad=False) if is_tensor else value)
    return made


def test_the_engine_names_the_loader_of_the_plugin() -> None:
    assert engine_config.DUMMY_LOADERS == {"dummy": dummy_weights.NWOR_LOAD_FORMAT}


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "heads", "kv_heads"),
    [(64, 64, 4, 4), (128, 128, 3, 1), (256, 256, 7, 1), (192, 128, 8, 2)],
)
def test_a_row_has_5_to_20_percent_of_its_attention_at_1000_tokens(
    head_dim: int, value_dim: int, heads: int, kv_heads: int
) -> None:
    hidden, tokens = 512, 1000
    torch.manual_seed(3)
    rows = (heads + kv_heads) * head_dim + kv_heads * value_dim
    weight = torch.randn(rows, hidden) * hidden**-0.5
    before = weight.clone()
    lean_queries_on_keys(weight, heads, kv_heads, head_dim, value_dim)
    assert torch.equal(weight[heads * head_dim :], before[heads * head_dim :])
    inputs = torch.randn(tokens, hidden)
    query = (inputs @ weight[: heads * head_dim].T).view(tokens, kv_heads, -1, head_dim)
    key = (inputs @ weight[heads * head_dim :][: kv_heads * head_dim].T).view(tokens, kv_heads, -1)
    scores = torch.einsum("qghd,kgd->ghqk", query, key) / math.sqrt(head_dim)
    own = scores.softmax(-1).diagonal(dim1=-2, dim2=-1)
    assert 0.05 < own.mean() < 0.20
    assert query.std() == pytest.approx(1.0, abs=0.05)


def test_queries_laid_out_otherwise_are_left_random() -> None:
    weight = torch.randn(12 * 8, 16)
    before = weight.clone()
    lean_queries_on_keys(weight, 4, 2, head_dim=8, value_dim=8)  # 4 gates beside 4 queries
    assert torch.equal(weight, before)


def test_each_kind_of_parameter_gets_its_value() -> None:
    with set_current_vllm_config(VllmConfig()):
        norms = {"inner": RMSNorm(8), "gemma": GemmaRMSNorm(8), "norm": RMSNorm(64)}
    for norm in norms.values():
        norm.weight.data.uniform_(-1e-3, 1e-3)
    quantised = torch.ones(4, 4).to(torch.float8_e4m3fn)
    whole = nn.ModuleDict(
        norms
        | {
            "linear": holder(weight=drawn(256, 512), bias=drawn(256)),
            "experts": holder(w13_weight=drawn(4, 64, 128)),
            "packed": holder(qweight=torch.ones(4, 4, dtype=torch.int32), weight=quantised),
            "scaled": holder(weight_scale=drawn(4), k_scale=drawn(1)[0]),
            "mamba": holder(A_log=drawn(4), dt_bias=drawn(4), D=drawn(4)),
            "conv1d": holder(weight=drawn(4, 1, 3)),
        }
    )
    kept = {n: p.clone() for n, p in whole.named_parameters() if n.split(".")[0] in
            ("packed", "mamba", "conv1d") or n == "scaled.weight_scale"}  # fmt: skip
    assert fill(whole) == {"matrices": 2, "norms": 3, "zeros": 1, "scales": 1, "left_alone": 7}
    values = dict(whole.named_parameters())
    assert values["linear.weight"].std() == pytest.approx(512**-0.5, rel=0.02)
    assert values["experts.w13_weight"].std() == pytest.approx(128**-0.5, rel=0.02)
    assert (values["inner.weight"] == 1).all()
    assert set(values["norm.weight"].tolist()) == {1.0, -1.0}  # a tied head must not echo
    assert (values["gemma.weight"] == 0).all()  # Gemma's norm multiplies by 1 + weight
    assert (values["linear.bias"] == 0).all()
    assert values["scaled.k_scale"] == 1
    for name, before in kept.items():
        assert torch.equal(values[name].float(), before.float()), name


def test_values_follow_from_names_and_sharded_ones_from_the_rank() -> None:
    def made(name: str = "a", **shard: int) -> torch.Tensor:
        whole = nn.ModuleDict({name: holder(weight=drawn(16, 16), **shard)})
        fill(whole)
        return next(whole.parameters()).data

    assert torch.equal(made(), made(tp_size=1, tp_rank=0))
    assert not torch.equal(made(tp_size=2, tp_rank=0), made(tp_size=2, tp_rank=1))
    assert not torch.equal(made("b"), made())
