"""Times the contenders of a window's attention on the layers and caches of a running engine.

As in an engine: each layer reads a cache of its own, one after the other in a CUDA graph, so that a
layer's context is in L2 for none of them; stock's write is in stock's time. Contenders are
interleaved, in an order and its reverse. Block tables and lengths are made up. Nothing is written
to the engine's cache: contents do not change a kernel's time, and stock writes to scratch memory.
"""

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from nwor_bench.instruments.conditions import ConditionMonitor, Conditions
from nwor_bench.plugin import refusals
from nwor_bench.plugin.layers import causal_implementation
from nwor_bench.plugin.runner_v2.attention import StagingAttention
from nwor_bench.plugin.runner_v2.attention_choice import Size
from nwor_bench.plugin.runner_v2.attention_decision import LENGTHS, TILINGS, Contender
from nwor_bench.plugin.runner_v2.capture_streams import unused_stream
from nwor_bench.plugin.runner_v2.mla_attention import MlaStagingAttention
from nwor_bench.plugin.runner_v2.staged_layer import StagedLayer
from nwor_kernels.attention_step import AttentionStep, StepRequests
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.verify_attention.tuning import Tiling, tilings

logger = logging.getLogger("vllm.nwor_bench")

BUILDERS = (
    "FlashAttentionMetadataBuilder",
    "FlashAttnMLAMetadataBuilder",
    "TritonAttentionMetadataBuilder",
)
"""Their metadata can be made of any lengths, without a runner's state.

Latent layers of FlashMLA and of Triton are not timed: our kernel attends their windows.
"""

COLD_BYTES = 256 << 20
"""Bytes of context that a round reads at least: several times any GPU's L2."""

MAX_TIMED_LAYERS = 8

ROUND_S = 0.04
"""About the time that one length of one size may take, compilation left out."""

MIN_TIMED_BLOCKS, MAX_TIMED_BLOCKS = 3, 10


class AttentionTiming:
    """The contenders of one shape of layers, on some of these layers.

    Args:
        layers: of one shape, of one group of vLLM's.
    """

    def __init__(
        self, runner: Any, layers: Sequence[StagingAttention] | Sequence[MlaStagingAttention]
    ):
        self._runner, self._layers = runner, layers
        self._builder = _builder_of(runner, layers[0].name)
        self._random = random.Random(0)
        self._monitor = ConditionMonitor(gpus=True)
        self._stream = unused_stream(runner.device)

    def lengths(self, size: Size) -> tuple[int, ...]:
        """Contexts of `LENGTHS` that the cache has room for, or the longest that it has."""
        requests, rows = size
        first = self._layers[0]
        cache, impl = first.cache_rows(), first.layer.impl
        composite = causal_implementation(impl) is not impl
        known = type(self._builder).__name__ in BUILDERS
        if not known or composite or refusals.chunk_of(first.layer) > 0:
            return ()
        blocks = min(layer.cache_rows().shape[0] for layer in self._layers)
        room = (blocks - 1) // requests * cache.shape[2]
        longest = min(room, self._runner.max_model_len) - rows
        if longest < 1:
            return ()
        return tuple(sorted({min(length, longest) for length in LENGTHS}))

    def conditions(self) -> Conditions:
        """The GPU's since the last call: other processes, clocks, throttling."""
        conditions = self._monitor.end()
        self._monitor.begin()
        return {name: value for name, value in conditions.items() if name.startswith("gpu_")}

    @torch.inference_mode()
    def times(self, size: Size, length: int) -> dict[Contender, list[float]]:
        """Seconds of one layer by contender, a block each; without contenders that fail."""
        kind = _LatentStep if isinstance(self._layers[0], MlaStagingAttention) else _Step
        step = kind(self._runner, self._layers, self._builder, size, length)
        graphs = {}
        for contender, forward in step.contenders().items():
            try:
                forward()  # compiles
                graphs[contender] = self._capture(forward)
            except Exception:
                if contender is Contender.STOCK:
                    raise
                logger.exception("nwor: attention by %s could not be timed", contender)
        torch.cuda.synchronize()
        times = self._measure(graphs)
        return {contender: [t / step.layers for t in ts] for contender, ts in times.items()}

    def _capture(self, forward: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of it. `torch.cuda.graph` would collect garbage each time.

        Its memory pool is its own: a capture that fails leaves a pool unusable, and PyTorch takes
        no pool again whose graphs are gone.
        """
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                forward()
            finally:
                graph.capture_end()
        return graph

    def _measure(
        self, graphs: dict[Contender, torch.cuda.CUDAGraph]
    ) -> dict[Contender, list[float]]:
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

        def seconds(graph: torch.cuda.CUDAGraph) -> float:
            graph.replay()  # the next launch is ready before this one ends
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        once = sum(map(seconds, graphs.values()))
        blocks = max(MIN_TIMED_BLOCKS, min(MAX_TIMED_BLOCKS, int(ROUND_S / (4 * once))))
        times: dict[Contender, list[float]] = {contender: [] for contender in graphs}
        for _ in range(blocks):
            order = self._random.sample(list(graphs), len(graphs))
            both = dict.fromkeys(order, 0.0)
            for contender in order + order[::-1]:
                both[contender] += seconds(graphs[contender]) / 2
            for contender, mean in both.items():
                times[contender].append(mean)
        return times


class _Step:
    """Made-up inputs of a step of equal windows behind contexts of one length."""

    def __init__(
        self,
        runner: Any,
        layers: Sequence[Any],
        builder: Any,
        size: Size,
        length: int,
    ):
        requests, self._rows = size
        first, device = layers[0], runner.device
        cache, rows = first.cache_rows(), requests * self._rows
        _, kv_heads, self._block_size, width = cache.shape
        blocks = min(layer.cache_rows().shape[0] for layer in layers)
        read = requests * length * kv_heads * width * cache.element_size()
        self.layers = max(1, min(MAX_TIMED_LAYERS, len(layers), -(-COLD_BYTES // read)))
        self._layers = layers[: self.layers]
        self._max_seq_len = int(runner.max_model_len)
        per_request = -(-(length + self._rows) // self._block_size)
        number = torch.arange(requests * per_request, device=device)
        stride = next(n for n in (7919, 7907, 1) if (blocks - 1) % n)
        # Scattered over the cache; block 0 is vLLM's null block.
        scattered = 1 + number * stride % (blocks - 1)
        table = scattered.view(requests, per_request).int()
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * self._rows
        seq_lens = torch.full((requests,), length + self._rows, dtype=torch.int32, device=device)
        self._requests = StepRequests(starts, seq_lens, table, starts[:-1], starts[1:])
        self._seq_lens = seq_lens
        self._lengths = torch.empty_like(seq_lens)

        self._make_activations(runner, rows)
        size_of_scratch = (-(-rows // self._block_size), *first.layer.kv_cache.shape[1:])
        self._scratch = [
            torch.zeros(size_of_scratch, dtype=cache.dtype, device=device) for _ in self._layers
        ]
        self._slots = torch.arange(rows, device=device)
        on_host = starts.cpu()
        self._metadata = builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=on_host,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens.cpu(),
                num_reqs=requests,
                num_actual_tokens=rows,
                max_query_len=self._rows,
                max_seq_len=self._max_seq_len,
                block_table_tensor=table,
                slot_mapping=self._slots,
                causal=True,
            ),
        )

    def _make_activations(self, runner: Any, rows: int) -> None:
        """Queries, K, V and the output, as a fused projection leaves them."""
        first, device = self._layers[0], runner.device
        shape = first.group.kind.shape
        widths = [
            shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
            shape.kv_heads * shape.value_dim,
        ]
        fused = torch.randn(rows, sum(widths), dtype=runner.dtype, device=device)
        query, key, value = torch.split(fused, widths, dim=1)
        query = query.view(rows, shape.heads, shape.head_dim)
        takes_e4m3 = getattr(first.layer.impl, "supports_quant_query_input", False)
        if shape.cache_dtype.startswith("fp8") and takes_e4m3:
            query = quantize_e4m3(query, first.layer._q_scale.view(-1))
        self._query: Any = query
        self._key = key.view(rows, shape.kv_heads, shape.head_dim)
        self._value = value.view(rows, shape.kv_heads, shape.value_dim)
        self._output = query.new_empty(rows, shape.heads, shape.value_dim, dtype=runner.dtype)

    def contenders(self) -> dict[Contender, Callable[[], None]]:
        """A forward over all layers for each."""
        group = self._layers[0].group
        shape = group.kind.shape
        wide = max(shape.head_dim, shape.value_dim)
        worth = tilings(self._rows, shape.ratio, wide)
        contenders: dict[Contender, Callable[[], None]] = {Contender.STOCK: self._stock}
        for contender, tiling in TILINGS.items():
            if tiling is Tiling.USUAL or (tiling in worth and not shape.latent):
                contenders[contender] = partial(self._ours, contender)
        if group.committed is not None:
            contenders[Contender.MERGE] = self._merge
        return contenders

    def _stock(self) -> None:
        for staged, scratch in zip(self._layers, self._scratch, strict=True):
            layer = staged.layer
            layer.impl.do_kv_cache_update(layer, self._key, self._value, scratch, self._slots)
            layer.impl.forward(
                layer, self._query, self._key, self._value, layer.kv_cache, self._metadata,
                self._output,
            )  # fmt: skip

    def _ours(self, contender: Contender) -> None:
        for staged in self._layers:
            staged.verify(contender, self._step(staged, self._query))

    def _step(
        self, staged: StagedLayer, query: Tensor, query_pe: Tensor | None = None
    ) -> AttentionStep:
        return AttentionStep(
            query, self._key, self._value, staged.layer.kv_cache, self._requests, self._output,
            staged.rules, self._rows, self._max_seq_len, staged.scales(query), query_pe,
        )  # fmt: skip

    def _over(self) -> Any:
        committed = self._layers[0].group.committed
        return committed.over(self._metadata, self._seq_lens, self._rows, self._lengths)

    def _merge(self) -> None:
        over = self._over()
        for staged in self._layers:
            staged.merge(over, self._step(staged, self._query))


class _LatentStep(_Step):
    """One verification step of latent layers."""

    def _make_activations(self, runner: Any, rows: int) -> None:
        shape = self._layers[0].group.kind.shape
        rope = shape.head_dim - shape.value_dim

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=runner.dtype, device=runner.device)

        # The rotary parts are views of what both projections leave.
        of_query = normal(rows, shape.heads, shape.head_dim)
        self._query = normal(rows, shape.heads, shape.value_dim), of_query[..., -rope:]
        self._key = normal(rows, 1, shape.value_dim)
        self._output = normal(rows, shape.heads, shape.value_dim)
        self._value = normal(rows, 1, shape.head_dim)[..., -rope:]

    def _stock(self) -> None:
        for staged, scratch in zip(self._layers, self._scratch, strict=True):
            layer = staged.layer
            layer.impl.do_kv_cache_update(
                self._key.squeeze(1), self._value, scratch, self._slots, layer.kv_cache_dtype,
                layer._k_scale,
            )  # fmt: skip
            layer.impl.forward_mqa(self._query, layer.kv_cache, self._metadata, layer)

    def _ours(self, contender: Contender) -> None:
        for staged in self._layers:
            staged.verify(self._step(staged, *self._query))

    def _merge(self) -> None:
        over = self._over()
        for staged in self._layers:
            step = self._step(staged, *self._query)
            staged.merge(staged.layer.impl.forward_mqa, over, self._query, step)


def _builder_of(runner: Any, name: str) -> Any:
    groups = (group for groups in runner.attn_groups for group in groups)
    return next((group.metadata_builders[0] for group in groups if name in group.layer_names), None)
