"""Faults of one layer, each of a chosen size, and the smallest that the local gate sees.

Every kind is planted in one layer of the target, on either runner. A size is a fraction (0.01: 1 %)
or, for kinds without a fraction, a count.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from engine_tools import run_cell, worker_of
from planted_commits import Commit, after_commit, wrapped
from torch import Tensor

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.analysis.parity.local import LocalResult, local_result
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.plugin.layers import slot_index
from nwor_bench.plugin.observe.errors import bits_of
from nwor_kernels.attention_step import AttentionStep

PlantOf = Callable[[Any, float], AbstractContextManager[None]]
"""Plants a fault of a size in a worker."""

HEAD = 1
"""The head that has the fault, of those kinds that are in one head."""


@dataclass(frozen=True)
class LayerFault:
    """A kind of fault.

    Attributes:
        name: its row in the table.
        plant: plants it.
        sizes: from large to small.
        must: the largest size that has to be seen.
        applies: whether a worker's model has such a layer.
    """

    name: str
    plant: PlantOf
    sizes: Sequence[float]
    must: float
    applies: Callable[[Any], bool] = lambda worker: True


def _on_gpu(worker: Any) -> bool:
    return bool(worker.nwor_hook.name == "V2")


def _attending(worker: Any) -> list[Any]:
    """The target's layers with attention of ours, of either runner."""
    hook = worker.nwor_hook
    if _on_gpu(worker):
        return list(hook._parts.layers)
    context = hook.runner.compilation_config.static_forward_context
    return [context[layer.name].impl for layer in hook.buffers.layers]


def _layer(worker: Any) -> Any:
    """The layer that has the fault: the second one."""
    return _attending(worker)[1]


def _cpu_attention(
    worker: Any,
    scores_of: Callable[[Any], Any] = lambda scores: scores,
    after: Callable[[Tensor], None] = lambda output: None,
) -> AbstractContextManager[None]:
    """With the layer's attention changed on the CPU while it stages: its scores, or its output."""
    from nwor_bench.plugin.runner_v1 import cpu_attention

    cache = worker.nwor_hook.buffers.layers[1].kv_cache.data_ptr()

    def around(original: Any) -> Any:
        def attend(
            query: Any, kv_cache: Any, plan: Any, output: Any, scores: Any, staged: Any
        ) -> None:
            if staged is None or kv_cache.data_ptr() != cache:
                return original(query, kv_cache, plan, output, scores, staged)
            original(query, kv_cache, plan, output, scores_of(scores), staged)
            return after(output)

        return attend

    return wrapped(cpu_attention, "verify_attention_reference", around)


def _attention_changed(
    worker: Any, change: Callable[[Tensor], None]
) -> AbstractContextManager[Any]:
    """With `change` applied to [rows, heads, value_dim] that the layer's attention returns."""

    def around(original: Any) -> Any:
        def attend(*given: Any) -> Any:
            answer = original(*given)
            if isinstance(answer, Tensor):  # what the merge of a latent layer made
                change(answer)
            else:
                change(given[0].output if isinstance(given[0], AttentionStep) else given[-1])
            return answer

        return attend

    layer = _layer(worker)
    if not _on_gpu(worker):
        return _cpu_attention(worker, after=change)
    both = ExitStack()
    for name in ("_verify",) if hasattr(layer, "_verify") else ("verify", "merge"):
        both.enter_context(wrapped(layer, name, around))
    return both


def scale_wrong(worker: Any, size: float) -> AbstractContextManager[None]:
    """The softmax scale of one layer is too large."""

    def larger(rules: Any) -> Any:
        return replace(rules, scale=rules.scale * (1 + size))

    if _on_gpu(worker):
        return wrapped(_layer(worker), "rules", larger)
    return _cpu_attention(worker, scores_of=larger)


def output_too_large(*at: Any) -> PlantOf:
    """What attention returns is too large at this index of [rows, heads, value_dim]."""

    def plant(worker: Any, size: float) -> AbstractContextManager[None]:
        def change(output: Tensor) -> None:
            output[at] *= 1 + size

        return _attention_changed(worker, change)

    return plant


def value_wrong(worker: Any, size: float) -> AbstractContextManager[None]:
    """V of one head is too large as it is staged: attention reads it, the commit writes it."""

    def around(original: Any) -> Any:
        def stage(layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
            if layer == 1:
                value = value.clone()
                value[:, HEAD % value.shape[1]] *= 1 + size
            return str(original(layer, key, value, rows))

        return stage

    return wrapped(worker.nwor_hook.buffers, "stage", around)


def in_wrapper(ours: tuple[str, int], on_cpu: tuple[str, int]) -> PlantOf:
    """One head of an argument is too large, in front of everything else in our wrapper.

    Args:
        ours: method of a `StagedLayer`, and the argument's place: [rows, heads, width].
        on_cpu: likewise, of our backend's implementation, itself at place 0.
    """

    def plant(worker: Any, size: float) -> AbstractContextManager[None]:
        layer, on_gpu = _layer(worker), _on_gpu(worker)
        method, place = ours if on_gpu else on_cpu

        def around(original: Any) -> Any:
            def called(*given: Any, **named: Any) -> Any:
                own = list(given)
                staging = None if on_gpu or own[0] is not layer else layer.staging
                if on_gpu or (staging is not None and staging.window.is_staging):
                    own[place] = part = own[place].clone()
                    head = part[:, HEAD % part.shape[1]]
                    head.copy_(enlarged(head, size))
                return original(*own, **named)

            return called

        return wrapped(layer if on_gpu else type(layer), method, around)

    return plant


def enlarged(values: Tensor, size: float) -> Tensor:
    """Larger by this part; fp8 by an eighth at least, since it rounds less to what was there."""
    if values.itemsize > 1:
        return values * (1 + size)
    most = torch.finfo(values.dtype).max
    return (values.float() * (1 + max(size, 1 / 8))).clamp(-most, most)


def sliding_window_short(worker: Any, size: float) -> AbstractContextManager[None]:
    """The first layer that slides sees this many positions too few."""
    layer = next(each for each in _attending(worker) if each.rules.sliding_window > 0)
    seen = layer.rules.sliding_window - int(size)
    return wrapped(layer, "rules", lambda rules: replace(rules, sliding_window=seen))


def sinks_missing(worker: Any, size: float) -> AbstractContextManager[None]:
    """Attention leaves out the sinks of one layer."""
    layer = next(each for each in _attending(worker) if each.rules.sinks is not None)
    return wrapped(layer, "rules", lambda rules: replace(rules, sinks=None))


def _after_commit(worker: Any, change: Callable[[Tensor, Tensor], None]) -> Any:
    """With `change(cache, slots)` after each commit, in one layer; the cache as integers."""

    @after_commit
    def plant(window: Commit) -> None:
        change(bits_of(window.staging.layers[1].kv_cache), window.slots_of(1))

    return plant(worker)


def slot_wrong(worker: Any, size: float) -> AbstractContextManager[None]:
    """The lowest bit of one element of one committed row, in one head, is flipped.

    Row 0 of a window on a GPU is its certain token; on a CPU, the first draft.
    """

    def change(cache: Tensor, slots: Tensor) -> None:
        block, _, offset = slot_index(cache, slots[slots >= 0][:1])
        cache[block, 0, offset, 3] ^= 1

    return _after_commit(worker, change)


def other_row_wrong(worker: Any, size: float) -> AbstractContextManager[None]:
    """The lowest bit of one element in a block of no request is flipped with each commit."""

    def change(cache: Tensor, slots: Tensor) -> None:
        cache[cache.shape[0] - 2, 0, 1, 3] ^= 1

    return _after_commit(worker, change)


def _slides(worker: Any) -> bool:
    return _on_gpu(worker) and any(e.rules.sliding_window > 0 for e in _attending(worker))


def _has_sinks(worker: Any) -> bool:
    return _on_gpu(worker) and any(e.rules.sinks is not None for e in _attending(worker))


def _watched(worker: Any) -> bool:
    """Blocks of no request are watched if nothing but attention writes to their memory."""
    return not (_on_gpu(worker) and worker.nwor_hook._parts.recurrent)


def _has_queries(worker: Any) -> bool:
    """Latent layers' queries come in parts."""
    return not _on_gpu(worker) or hasattr(_layer(worker), "_verify")


IN_WRITE = ("slots_to_write", 1), ("do_kv_cache_update", 3)
IN_ATTENTION = ("_verify", 1), ("forward", 2)

PARTS = (0.1, 0.03, 0.02, 0.01, 0.003, 0.001, 0.0003, 0.0001)

LAYER_FAULTS = (
    LayerFault("softmax scale of one layer", scale_wrong, PARTS, 0.02),
    LayerFault("attention's output, all heads of one layer", output_too_large(...), PARTS, 0.01),
    LayerFault("attention's output, one head", output_too_large(slice(None), HEAD), PARTS, 0.01),
    LayerFault("attention's output, one head of one row", output_too_large(2, HEAD), PARTS, 0.1),
    LayerFault("V of one head as it is staged", value_wrong, PARTS, 0.01),
    LayerFault("V of one head in our write", in_wrapper(*IN_WRITE), PARTS, 0.01),
    LayerFault("queries of one head in our attention", in_wrapper(*IN_ATTENTION), PARTS, 0.03,
               _has_queries),
    LayerFault("sliding window short by positions", sliding_window_short, (8, 2, 1), 1, _slides),
    LayerFault("sinks left out, layers", sinks_missing, (1,), 1, _has_sinks),
    LayerFault("bits of one slot", slot_wrong, (1,), 1),
    LayerFault("bits of a row that the window does not write", other_row_wrong, (1,), 1, _watched),
)  # fmt: skip


def check_a_batch(
    engine: VllmEngine, prompts: list[list[int]], nwor: str = "stage", scv: str = "off",
    tokens: int = 16,
) -> LocalResult:  # fmt: skip
    """One batch with the local gate on; graphs are compared on their own inputs alone.

    A fault is planted into the checking graph, not into the one that is timed.
    """
    from nwor_bench.records.types import Cell, NworMode, ScvMode

    engine.set_modes(Cell("tiny", NworMode(nwor), ScvMode(scv)))
    engine.check_layers(len(prompts))
    try:
        run_cell(engine, nwor, scv, prompts, tokens)
    finally:
        ranks = engine.check_layers(None)
    for windows in ranks:
        for window in windows:
            window["graphs"] = {"repeated": 0, "checking": 0}
    return local_result(ranks)


def smallest_seen(
    engine: VllmEngine, prompts: list[list[int]], fault: LayerFault
) -> tuple[float | None, str]:
    """The smallest size that is seen, all larger ones being seen too; and the last reason.

    Sizes that need not be seen are tried only for the table (see `keep_sizes`).
    """
    smallest, reason = None, "not seen"
    sizes = fault.sizes if os.environ.get("NWOR_BENCH_PLANTED") else [fault.must]
    for size in sizes:
        with fault.plant(worker_of(engine), size):
            found = check_a_batch(engine, prompts)
        if found.verdict is not KvVerdict.BROKEN:
            reason = reason if smallest else f"not seen: {found.verdict}, {found.reason}"
            break
        smallest, reason = size, found.reason or ""
    return smallest, reason


def keep_sizes(column: str, sizes: dict[str, float | None]) -> None:
    """With NWOR_BENCH_PLANTED=FOLDER, add a column's sizes to FOLDER/smallest.csv."""
    folder = os.environ.get("NWOR_BENCH_PLANTED")
    if not folder:
        return
    path = Path(folder) / "smallest.csv"
    rows = pd.DataFrame(
        [{"engine": column, "fault": name, "smallest": size} for name, size in sizes.items()]
    )
    if path.is_file():
        known = pd.read_csv(path)
        rows = pd.concat([known[known["engine"] != column], rows])
    rows.to_csv(path, index=False)
