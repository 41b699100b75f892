"""Our attention reads the runner's own lengths, offsets and block tables, of each layer's group."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nwor_bench.plugin.layers import StagingUnavailable, attention_layers, slot_rows
from nwor_bench.plugin.runner_v2.staged_layer import StepInputs


def group(names: list[str], block_size: int, kernel_block_size: int | None = None) -> Any:
    """vLLM's AttentionGroup; of a backend with smaller blocks it has a block table of its own."""
    table = torch.arange(400, 432).view(1, 4, 8) if kernel_block_size else None
    return SimpleNamespace(
        layer_names=names,
        kv_cache_spec=SimpleNamespace(block_size=block_size),
        kernel_block_size=kernel_block_size,
        kernel_block_table=table,
    )


def runner_of(cache_sizes: dict[str, int]) -> Any:
    """Two KV-cache groups, the first with two backends; layers with caches of these block sizes."""
    layers = {
        name: SimpleNamespace(kv_cache=torch.empty(1, 1, size, 1))
        for name, size in cache_sizes.items()
    }
    tables = [torch.arange(start, start + 16).view(4, 4) for start in (100, 200)]
    return SimpleNamespace(
        attn_groups=[[group(["a"], 32), group(["b"], 32, 16)], [group(["c", "drafter"], 64)]],
        block_tables=SimpleNamespace(input_block_tables=tables),
        input_buffers=SimpleNamespace(
            query_start_loc=torch.tensor([0, 5, 10, 15, 15]), seq_lens=torch.tensor([7, 8, 9, 0])
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        max_model_len=512,
    )


SIZES = {"a": 32, "b": 16, "c": 64, "drafter": 1}


def test_each_layer_has_its_groups_table_in_its_kernels_blocks() -> None:
    runner = runner_of(SIZES)
    inputs = StepInputs(runner, ["a", "b", "c"])
    bounds = torch.from_numpy(np.array([9, 40, 11, 99], dtype=np.int32))
    inputs.open(SimpleNamespace(num_reqs=3, seq_lens_cpu_upper_bound=bounds))
    views = inputs.views
    assert inputs.max_seq_len == 40
    first = {name: int(views.block_tables[inputs.table_of[name]][0, 0]) for name in "abc"}
    assert first == {"a": 100, "b": 400, "c": 200}
    assert all(table.shape[0] == 3 for table in views.block_tables)
    assert views.query_start_loc.tolist() == [0, 5, 10, 15]
    assert (views.row_start.tolist(), views.row_end.tolist()) == ([0, 5, 10], [5, 10, 15])
    runner.input_buffers.seq_lens += 5  # the runner writes the next step to the same buffers
    inputs.open_capture(3)
    assert inputs.views is views
    assert views.seq_lens.tolist() == [12, 13, 14]
    assert inputs.max_seq_len == 512


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_cache_whose_blocks_are_not_its_tables_is_refused(name: str) -> None:
    runner = runner_of({**SIZES, name: 8})
    with pytest.raises(StagingUnavailable, match=r"^attention:kernel_blocks$"):
        StepInputs(runner, ["a", "b", "c"])


def layers_in(*groups: list[str], shares: dict[str, str], drafter: set[str]) -> Any:
    names = [name for names in groups for name in names]
    context = {
        name: SimpleNamespace(kv_sharing_target_layer_name=shares.get(name)) for name in names
    }
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups]
        ),
        compilation_config=SimpleNamespace(static_forward_context=context),
        speculator=SimpleNamespace(draft_attn_layer_names=drafter),
    )


@pytest.mark.slow  # vLLM's recurrent layers are imported
def test_only_the_targets_own_groups_count() -> None:
    """A drafter's layers may come first, last, between, or share a group with the target's."""
    shares = {"t3": "t1", "d3": "t0"}
    groups = (["d0"], ["t0", "d1"], ["d2"], ["t1", "t2", "t3"], ["d3"])
    runner = layers_in(*groups, shares=shares, drafter={"d0", "d1", "d2", "d3"})
    found = attention_layers(runner)
    assert found.staged == ["t0", "t1", "t2"]
    assert found.sharing == {"t3": "t1"}
    assert found.drafter == ["d0", "d1", "d2", "d3"]
    slots = slot_rows(runner, found.staged)
    mappings = torch.arange(5)[:, None].expand(5, 7)
    assert slots.several
    assert mappings[slots.chosen, 0].tolist() == [1, 2, 3]
    assert [int(mappings[slots.chosen, 0][row]) for row in slots.of_layer] == [1, 3, 3]
    one = slot_rows(runner, ["t1", "t2"])
    assert (one.chosen, one.of_layer, one.several) == (3, (0, 0), False)
