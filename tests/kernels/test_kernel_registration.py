"""The operators as PyTorch sees them: namespace, schema, fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import nwor_kernels
from nwor_kernels.mla_verify_attention import mla_verify_attention
from nwor_kernels.verify_attention import verify_attention


def stage_inputs():
    return (
        torch.randn(6, 2, 4),
        torch.randn(6, 2, 3),
        torch.tensor([1, -1, 5]),
        torch.zeros(4, 2, 4),
        torch.zeros(4, 2, 3),
        torch.zeros(2, dtype=torch.int32),
    )


def commit_inputs():
    return (
        torch.randn(2, 4, 2, 4),
        torch.randn(2, 4, 2, 3),
        [torch.zeros(3, 2, 8, 7), torch.zeros(3, 2, 8, 7)],
        torch.tensor([9, 2, -1]),
        torch.tensor([True, False, True]),
        torch.tensor([[2, 0], [2, 0]], dtype=torch.int32),
    )


def mask_inputs():
    return (
        torch.tensor([[1, 2, -1], [3, -1, -1]]),
        torch.tensor([2, 2], dtype=torch.int32),
        32,
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(2, dtype=torch.int32),
    )


def counts_inputs():
    return (
        torch.tensor([2, 1], dtype=torch.int32),
        None,
        torch.ones(4, dtype=torch.bool),
        torch.zeros(2, dtype=torch.int32),
        2,
    )


def attention_inputs():
    return (
        torch.randn(5, 4, 8),
        torch.randn(5, 2, 8),
        torch.randn(5, 2, 8),
        torch.randn(3, 2, 16, 16),
        torch.tensor([0, 3, 5], dtype=torch.int32),
        torch.tensor([20, 2], dtype=torch.int32),
        torch.tensor([[2, 0], [1, 9]], dtype=torch.int32),
        torch.tensor([1, 3], dtype=torch.int32),
        torch.tensor([3, 5], dtype=torch.int32),
        torch.zeros(5, 4, 8),
        0.3,
        3,
        32,
    )


def mla_inputs():
    return (
        torch.randn(5, 4, 32),
        torch.randn(5, 4, 16),
        torch.randn(5, 32),
        torch.randn(5, 16),
        torch.randn(3, 16, 48),
        *attention_inputs()[4:9],
        torch.zeros(5, 4, 32),
        0.3,
        3,
        32,
    )


OPERATORS = {
    "stage_kv_cache": (nwor_kernels.stage_kv_cache, stage_inputs, (3, 4, 5)),
    "commit_staged_kv_cache": (nwor_kernels.commit_staged_kv_cache, commit_inputs, (2, 5, 7)),
    "acceptance_mask": (nwor_kernels.acceptance_mask, mask_inputs, (3, 4)),
    "acceptance_mask_from_counts": (
        nwor_kernels.acceptance_mask_from_counts,
        counts_inputs,
        (2, 3),
    ),
    "mla_verify_attention": (mla_verify_attention, mla_inputs, (10,)),
    "verify_attention": (verify_attention, attention_inputs, (9,)),
}

each_operator = pytest.mark.parametrize("name", OPERATORS)


def overload(name):
    return getattr(torch.ops.nwor, name).default


@each_operator
def test_importing_the_package_registers_the_operator(name):
    assert str(overload(name)._schema).startswith(f"nwor::{name}(")
    assert name in nwor_kernels.__all__


@each_operator
def test_the_schema_names_exactly_what_is_mutated_and_returns_nothing(name):
    _, _, mutated = OPERATORS[name]
    schema = overload(name)._schema
    written = [i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None]
    assert tuple(written) == mutated
    assert all(schema.arguments[i].alias_info.is_write for i in written)
    assert not schema.returns


@pytest.mark.slow  # compiles
@each_operator
def test_opcheck(name):
    function, inputs, _ = OPERATORS[name]
    torch.library.opcheck(function, inputs())


@pytest.mark.slow  # the first call of an operator imports PyTorch's compiler
@each_operator
def test_the_operator_writes_only_what_it_says_it_mutates(name):
    _, inputs, mutated = OPERATORS[name]
    torch.manual_seed(0)
    before = inputs()
    torch.manual_seed(0)
    after = inputs()
    assert overload(name)(*after) is None

    def same(one, other):
        if isinstance(one, list):
            return all(same(a, b) for a, b in zip(one, other, strict=True))
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    changed = {i for i in range(len(before)) if not same(before[i], after[i])}
    assert changed
    assert changed <= set(mutated)


@pytest.mark.slow  # here too
@each_operator
def test_warm_up_with_fake_tensors_runs_no_kernel(name):
    _, inputs, _ = OPERATORS[name]
    with FakeTensorMode():
        fakes = inputs()
        assert any(isinstance(tensor, FakeTensor) for tensor in fakes)
        assert overload(name)(*fakes) is None


@pytest.mark.slow  # here too
@each_operator
def test_warm_up_on_the_meta_device(name):
    _, inputs, _ = OPERATORS[name]

    def to_meta(value):
        if isinstance(value, list):
            return [to_meta(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    assert overload(name)(*(to_meta(value) for value in inputs())) is None
