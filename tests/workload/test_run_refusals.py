"""Everything that a run cannot be: one table of what is given, and the refusal."""

from typing import Any

import pytest
from refusals import refused

from nwor_bench.workload.config import Scenario, resolve

SCENARIO = Scenario(
    name="toy", requests=2, batches=6, warmup=1, draft_tokens=4, max_new_tokens=8, max_model_len=64
)
OFF = {"nwor_modes": "off", "scv_modes": "off"}
BASES: dict[str, dict[str, Any]] = {
    "grid": {},
    "against": {"against": '{"block_size": 32}'},
    "one slot": {"against": '{"additional_config": {"nwor_state_slots": 1}}'},
    "counts": {**OFF, "draft_counts": [0, 4]},
    "engines": {**OFF, "draft_counts": [0, 1, 4], "engines": True},
}
"""Experiments that are sound as they stand."""

ONE_SLOT = 'additional_config={"nwor_state_slots": 1}'
BY_SIZE = "num_speculative_tokens_per_batch_size"

ANY = object()
"""The value is another test's."""

ROWS: tuple[tuple[str, dict[str, Any], str, object, str], ...] = (
    # Values.
    ("grid", {"draft_tokens": 0}, "--draft-tokens", 0, "1 or more"),
    ("grid", {"requests": 0}, "--requests", 0, "1 or more"),
    ("grid", {"requests": 10**9}, "--requests", 10**9, "100000 or less"),
    ("grid", {"batches": 10**9}, "--batches", 10**9, "10000 or less"),
    ("grid", {"max_new_tokens": 1}, "--max-new-tokens", 1, "2 or more"),
    ("grid", {"warmup": -1}, "--warmup", -1, "0 or more"),
    ("grid", {"temperature": -0.1}, "--temperature", -0.1, "0 or more"),
    ("grid", {"temperature": float("nan")}, "--temperature", ANY, "finite"),
    ("grid", {"top_p": 0.0}, "--top-p", 0.0, "greater than 0"),
    ("grid", {"top_p": 1.5}, "--top-p", 1.5, "1 or less"),
    ("grid", {"max_model_len": 0}, "--max-model-len", 0, "2 or more"),
    ("grid", {"max_model_len": 12}, "--max-model-len", 12, "more than 12"),
    ("grid", {"seed": -1}, "--seed", -1, "0 or more"),
    ("grid", {"seed": 2**32}, "--seed", 2**32, "4294967295 or less"),
    ("grid", {"tensor_parallel_size": 0}, "--tensor-parallel-size", 0, "1 or more"),
    ("grid", {"block_size": 0}, "block_size", 0, ""),
    ("grid", {"kv_cache_gib": 0.0}, "kv_cache_gib", 0.0, ""),
    ("grid", {"max_warmup": 0}, "--max-warmup", 0, "1 (--warmup) or more"),
    ("grid", {"max_warmup": 3}, "--max-warmup", 3, "--warmup 3"),
    ("grid", {"max_blocks": 9}, "--max-blocks", 9, "--ci-width"),
    ("grid", {"max_blocks": 3, "ci_width": "1%"}, "--max-blocks", 3, "6 (--batches) or more"),
    ("grid", {"batches": 0, "ci_width": "1%"}, "--batches", 0, "--ci-width"),
    ("grid", {"batches": 0, "time_budget": "9s"}, "--batches", 0, "--time-budget"),
    # Modes and cells.
    ("grid", {"nwor_modes": "OFF"}, "--nwor-modes", "OFF", "unknown"),
    ("grid", {"nwor_modes": "off,stgae"}, "--nwor-modes", "stgae", "'stage'"),
    ("grid", {"scv_modes": "off,grph"}, "--scv-modes", "grph", "'graph'"),
    ("grid", {"scv_modes": "off,graph,off"}, "--scv-modes", "off,graph,off", "once"),
    ("grid", {"nwor_modes": ""}, "--nwor-modes", "", "off,stage"),
    ("grid", {"nwor_modes": "off,"}, "--nwor-modes", "off,", "off,stage"),
    ("grid", {"nwor_modes": "stage"}, "--nwor-modes", "stage", "off,stage"),
    ("grid", {"scv_modes": "graph,adaptive"}, "--scv-modes", ANY, "off,graph,adaptive"),
    ("grid", {"cells": "stage-graph", "scv_modes": "off,adaptive"}, "--cells", "stage-graph",
     "--scv-modes"),
    ("grid", {"cells": "stage-on"}, "--cells", "stage-on", ""),
    ("grid", {"nwor_modes": "off", "stage_by": "copy"}, "stage_by", "copy", "no cell stages"),
    ("grid", {"adaptive_verification": True}, "--adaptive-verification", True, "engines = true"),
    ("grid", {"engines": True}, "--engines", True, "draft_counts"),
    # What vLLM takes as JSON.
    ("grid", {"dtype": "float23"}, "--dtype", "float23", "'float32'"),
    ("grid", {"speculative_config": "null"}, "--speculative-config", "null", ""),
    ("grid", {"speculative_config": "{method"}, "--speculative-config", "{method", "not JSON"),
    ("grid", {"speculative_config": "[1]"}, "--speculative-config", "[1]", ""),
    ("grid", {"engine_args": "4"}, "--engine-args", "4", ""),
    ("grid", {"engine_args": "[" * 100_000}, "--engine-args", ANY, "not JSON"),
    ("grid", {"engine_args": '{"model": "x"}'}, "--engine-args", "model", "--target-model"),
    ("grid", {"engine_args": '{"seed": 1}'}, "--engine-args", "seed", "--seed"),
    ("grid", {"engine_args": '{"hf_overrides": {"a": 84}}'}, "--engine-args", "hf_overrides",
     "pair file"),
    ("grid", {"engine_args": '{"max-num-seqs": 1}'}, "--engine-args", "max-num-seqs",
     "'max_num_seqs'"),
    ("grid", {"engine_args": BASES["one slot"]["against"]},
     "--engine-args: additional_config: nwor_state_slots", {"nwor_state_slots": 1}, "--against"),
    ("grid", {"draft_tokens": 3, "speculative_config": '{"num_speculative_tokens": 7}'},
     "--draft-tokens", 3, "--speculative-config"),
    ("grid", {"speculative_config": '{"num_speculative_tokens": "x"}'}, "--draft-tokens", "x", ""),
    ("grid", {"acceptance_length": "5.1"}, "--acceptance-length", "5.1", "1 to 5"),
    ("grid", {"acceptance_length": 0.9}, "--acceptance-length", 0.9, "1 to 5"),
    ("grid", {"acceptance_length": "nan"}, "--acceptance-length", "nan", "1 to 5"),
    # A second engine with further arguments.
    ("against", {"against": "{}"}, "--against", {}, "write an argument"),
    ("against", {"against": "[1]"}, "--against", "[1]", ""),
    ("against", {"against": '{"dtype": "float16"}'}, "--against", "dtype", "for both"),
    ("against", {"against": '{"block-size": 32}'}, "--against", "block-size", "'block_size'"),
    ("against", {"against": '{"worker_extension_cls": "a"}'}, "--against", "worker_extension_cls",
     "itself"),
    ("against", {"against": '{"block_size": 0}'}, "--against: block_size", 0, "1 or more"),
    ("against", {"block_size": 32}, "--against: block_size", 32, "--engine-args"),
    ("against", {"nwor_modes": "off,stage,control"}, "--against", "block_size=32", "off"),
    ("against", {"cells": "stage-off"}, "--against", "block_size=32", "cells"),
    ("against", {"interleave": "windows"}, "--interleave", "windows", "(--against)"),
    ("against", {"counters": "dram"}, "--counters", "dram", "(--against starts"),
    ("against", {**BASES["counts"]}, "--against", "block_size=32", "leave one out"),
    ("against", {**BASES["engines"]}, "--against", "block_size=32", "leave one out"),
    ("one slot", {"nwor_modes": "off"}, "--against", ONE_SLOT, "stages"),
    ("one slot", {"nwor_modes": "off,stage,control"}, "--against", ONE_SLOT, "stages"),
    ("one slot", {"scv_modes": "off,adaptive,graph"}, "--against", ONE_SLOT, "off,MODE"),
    ("one slot", {"cells": "stage-off"}, "--against", ONE_SLOT, "cells"),
    ("one slot", {"interleave": "windows"}, "--interleave", "windows", "(--against)"),
    # Draft counts in one engine.
    ("counts", {"draft_counts": [1, 4]}, "draft_counts", [1, 4], "write 0"),
    ("counts", {"draft_counts": [0, 2], "draft_tokens": 4}, "draft_counts", [0, 2], "is 4"),
    ("counts", {"draft_counts": []}, "draft_counts", ANY, ""),
    ("counts", {"nwor_modes": "off,control"}, "--nwor-modes", "off,control", "no control"),
    ("counts", {"scv_modes": "off,adaptive"}, "--scv-modes", "off,adaptive", "nothing stages"),
    ("counts", {"nwor_modes": "off,stage", "scv_modes": "off,graph,adaptive"}, "--scv-modes",
     "off,graph,adaptive", "the one mode"),
    ("counts", {"interleave": "batches"}, "--interleave", "batches", "within a batch"),
    ("counts", {"cells": "off-graph"}, "--cells", "off-graph", "are the cells"),
    ("counts", {"speculative_config": {BY_SIZE: []}}, f"--speculative-config: {BY_SIZE}", True, ""),
    # An engine for each draft count.
    ("engines", {"nwor_modes": "off,stage"}, "--nwor-modes", "off,stage", "NWOR is off"),
    ("engines", {"interleave": "windows"}, "--interleave", "windows", "(--engines)"),
    ("engines", {"counters": "dram"}, "--counters", "dram", "(--engines starts"),
    ("engines", {"draft_counts": [0, 1], "draft_tokens": 4}, "draft_counts", [0, 1], "is 4"),
    ("engines", {"engines": False, "adaptive_verification": True}, "--adaptive-verification", True,
     "--engines"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("base", "given", "field", "value", "text"), ROWS,
    ids=[f"{number}-{row[0]}-{row[2]}" for number, row in enumerate(ROWS)],
)  # fmt: skip
def test_it_is_refused(
    base: str, given: dict[str, Any], field: str, value: object, text: str
) -> None:
    wanted = {} if value is ANY else {"value": value}
    with refused(field, naming=text, **wanted) as caught:
        resolve(SCENARIO, **{**BASES[base], **given})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("base", BASES)
def test_what_the_table_starts_from_is_sound(base: str) -> None:
    resolve(SCENARIO, **BASES[base])
