"""Times the contenders of a window's attention on the layers and caches of a running engine.

As in an engine: each layer reads a cache of its own, one after the other in a CUDA graph, so that a
layer's context is in L2 for none of them; stock's write is in stock's time. Contenders are
interleaved, in an order and its reverse. Block tables and lengths are made up. Nothing is written
to the engine's cache: contents do not change a kernel's time, and stock writes to scratch memory.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from nwor_bench.plugin import refusals
from nwor_bench.plugin.layers import causal_implementation
from nwor_bench.plugin.runner_v2.attention import KernelInputs, StagingAttention
from nwor_bench.plugin.runner_v2.attention_choice import LENGTHS, TILINGS, Contender, Size
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.verify_attention.tuning import tilings

BUILDERS = (FlashAttentionMetadataBuilder, TritonAttentionMetadataBuilder)
"""Their metadata can be made of any lengths, without a runner's state."""

COLD_BYTES = 256 << 20
"""Bytes of context that a round reads at least: several times any GPU's L2."""

MOST_LAYERS = 8

ROUND_S = 0.04
"""About the time that one length of one size may take, compilation left out."""

FEWEST_BLOCKS, MOST_BLOCKS = 2, 10


class AttentionTiming:
    """The contenders of one shape of layers, on some of these layers.

    Args:
        layers: of one shape, of one group of vLLM's.
    """

    def __init__(self, runner: Any, layers: Sequence[StagingAttention]):
        self._runner, self._layers = runner, layers
        self._builder = _builder_of(runner, layers[0].name)
        self._random = random.Random(0)
        self._stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]

    def lengths(self, size: Size) -> tuple[int, ...]:
        """Contexts of `LENGTHS` that the cache has room for, or the longest that it has."""
        requests, rows = size
        first = self._layers[0]
        cache, impl = first.cache_rows(), first.layer.impl
        composite = causal_implementation(impl) is not impl
        if type(self._builder) not in BUILDERS or composite or refusals.chunk_of(first.layer) > 0:
            return ()
        blocks = min(each.cache_rows().shape[0] for each in self._layers)
        room = (blocks - 1) // requests * cache.shape[2]
        longest = min(room, self._runner.max_model_len) - rows
        if longest < 1:
            return ()
        return tuple(sorted({min(length, longest) for length in LENGTHS}))

    @torch.inference_mode()
    def times(self, size: Size, length: int) -> dict[Contender, float]:
        """Seconds of one layer by contender."""
        step = _Step(self._runner, self._layers, self._builder, size, length)
        graphs = {}
        for contender, forward in step.contenders().items():
            forward()  # compiles
            graphs[contender] = self._capture(forward)
        torch.cuda.synchronize()
        return {c: t / step.layers for c, t in self._measure(graphs).items()}

    def _capture(self, forward: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph in vLLM's pool. `torch.cuda.graph` would collect garbage each time."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._runner.cudagraph_manager.pool)
            try:
                forward()
            finally:
                graph.capture_end()
        return graph

    def _measure(self, graphs: dict[Contender, torch.cuda.CUDAGraph]) -> dict[Contender, float]:
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
        blocks = max(FEWEST_BLOCKS, min(MOST_BLOCKS, int(ROUND_S / (4 * once))))
        times: dict[Contender, list[float]] = {contender: [] for contender in graphs}
        for _ in range(blocks):
            order = self._random.sample(list(graphs), len(graphs))
            for contender in order + order[::-1]:
                times[contender].append(seconds(graphs[contender]))
        return {contender: median(each) for contender, each in times.items()}


class _Step:
    """Made-up inputs of a step of equal windows behind contexts of one length."""

    def __init__(
        self,
        runner: Any,
        layers: Sequence[StagingAttention],
        builder: Any,
        size: Size,
        length: int,
    ):
        requests, self._rows = size
        first, device = layers[0], runner.device
        cache, rows = first.cache_rows(), requests * self._rows
        _, kv_heads, self._block_size, width = cache.shape
        blocks = min(each.cache_rows().shape[0] for each in layers)
        read = requests * length * kv_heads * width * cache.element_size()
        self.layers = max(1, min(MOST_LAYERS, len(layers), -(-COLD_BYTES // read)))
        self._layers = layers[: self.layers]
        self._max_seq_len = int(runner.max_model_len)
        impl, shape = first.layer.impl, first.group.kind.shape

        each = -(-(length + self._rows) // self._block_size)
        number = torch.arange(requests * each, device=device)
        stride = next(n for n in (7919, 7907, 1) if (blocks - 1) % n)
        # Scattered over the cache; block 0 is vLLM's null block.
        scattered = 1 + number * stride % (blocks - 1)
        table = scattered.view(requests, each).int()
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * self._rows
        seq_lens = torch.full((requests,), length + self._rows, dtype=torch.int32, device=device)
        self._inputs: KernelInputs = (starts, seq_lens, table, starts[:-1], starts[1:])
        self._seq_lens = seq_lens
        self._lengths = torch.empty_like(seq_lens)

        heads = shape.heads + kv_heads
        fused = torch.randn(
            rows, heads * shape.head_dim + kv_heads * shape.value_dim, dtype=runner.dtype,
            device=device,
        )  # fmt: skip
        query, key, value = torch.split(
            fused,
            [shape.heads * shape.head_dim, kv_heads * shape.head_dim, kv_heads * shape.value_dim],
            dim=1,
        )
        query = query.view(rows, shape.heads, shape.head_dim)
        quantised = shape.cache_dtype.startswith("fp8")
        if quantised and getattr(impl, "supports_quant_query_input", False):
            query = quantize_e4m3(query, first.layer._q_scale.view(-1))
        self._query = query
        self._key = key.view(rows, kv_heads, shape.head_dim)
        self._value = value.view(rows, kv_heads, shape.value_dim)
        self._output = torch.empty(
            rows, shape.heads, shape.value_dim, dtype=runner.dtype, device=device
        )
        size_of_scratch = (-(-rows // self._block_size), *cache.shape[1:])
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

    def contenders(self) -> dict[Contender, Callable[[], None]]:
        """A forward over all layers for each."""
        group = self._layers[0].group
        shape = group.kind.shape
        wide = max(shape.head_dim, shape.value_dim)
        worth = tilings(self._rows, shape.ratio, wide)
        found: dict[Contender, Callable[[], None]] = {Contender.STOCK: self._stock}
        for contender, tiling in TILINGS.items():
            if tiling in worth:
                found[contender] = partial(self._ours, contender)
        for contender in group.committed:
            found[contender] = partial(self._merge, contender)
        return found

    def _stock(self) -> None:
        for each, scratch in zip(self._layers, self._scratch, strict=True):
            layer = each.layer
            layer.impl.do_kv_cache_update(layer, self._key, self._value, scratch, self._slots)
            layer.impl.forward(
                layer, self._query, self._key, self._value, layer.kv_cache, self._metadata,
                self._output,
            )  # fmt: skip

    def _ours(self, contender: Contender) -> None:
        for each in self._layers:
            each.verify(
                contender, self._query, self._key, self._value, each.layer.kv_cache, self._inputs,
                self._output, self._rows, self._max_seq_len,
            )  # fmt: skip

    def _merge(self, contender: Contender) -> None:
        committed = self._layers[0].group.committed[contender]
        over = committed.over(self._metadata, self._seq_lens, self._rows, self._lengths)
        for each in self._layers:
            each.merge(
                over, self._query, self._key, self._value, each.layer.kv_cache, self._inputs,
                self._output, self._rows,
            )  # fmt: skip


def _builder_of(runner: Any, name: str) -> Any:
    groups = (group for groups in runner.attn_groups for group in groups)
    return next((group.metadata_builders[0] for group in groups if name in group.layer_names), None)
