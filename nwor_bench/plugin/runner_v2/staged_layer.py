"""A staged layer, and the inputs of its attention besides K/V: the V2 runner's, not a backend's.

The runner writes lengths, row offsets and block tables to buffers that it makes once, before every
forward, whether a graph replays it or not. A backend's metadata may have another form: chunked
local attention cuts requests into virtual ones.

There is one block table for each KV-cache group. If a backend takes smaller blocks than vLLM's
manager gives, its `AttentionGroup` keeps a table of kernel blocks, also a buffer made once. Slots
need no such table: kernel blocks cut a block into equal parts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nwor_bench.plugin.layers import StagingUnavailable, causal_implementation
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.window import LayerTrace, Window
from nwor_kernels.attention_step import AttentionStep, Scales, ScoreRules, StepRequests


class StepViews(NamedTuple):
    """The inputs of a step of so many requests, views of the runner's buffers."""

    query_start_loc: Tensor
    """[requests + 1] int32, first row of each request."""
    row_start: Tensor
    """[requests] int32, first row of each request."""
    row_end: Tensor
    """[requests] int32, the row after its last one."""
    seq_lens: Tensor
    """[requests] int32, tokens of each request, this step's included."""
    block_tables: tuple[Tensor, ...]
    """[requests, most blocks] int32 each; `StepInputs.table_of` numbers them."""


class StepInputs:
    """The runner's inputs of the step in flight.

    Args:
        names: the layers whose attention is ours.

    Raises:
        StagingUnavailable: a cache whose blocks are not those of its block table.
    """

    def __init__(self, runner: Any, names: Sequence[str]):
        self._query_start_loc = runner.input_buffers.query_start_loc
        self._seq_lens = runner.input_buffers.seq_lens
        self._most_tokens: int = runner.max_model_len
        self._block_tables: list[Tensor] = []
        self.table_of: dict[str, int] = {}
        """Number of each layer's block table."""
        self._views: dict[int, StepViews] = {}
        self.views: StepViews
        """Views of the step in flight."""
        self.max_seq_len = self._most_tokens
        """Upper bound of its `seq_lens`."""
        self._find_tables(runner, set(names))

    def _find_tables(self, runner: Any, names: set[str]) -> None:
        context = runner.compilation_config.static_forward_context
        for number, groups in enumerate(runner.attn_groups):
            for group in groups:
                wanted = names.intersection(group.layer_names)
                if not wanted:
                    continue
                table = runner.block_tables.input_block_tables[number]
                size = group.kv_cache_spec.block_size
                if group.kernel_block_size is not None:
                    table, size = group.kernel_block_table[0], group.kernel_block_size
                if any(context[name].kv_cache.shape[-2] != size for name in wanted):
                    raise StagingUnavailable("attention:kernel_blocks")
                self.table_of.update(dict.fromkeys(wanted, len(self._block_tables)))
                self._block_tables.append(table)

    def open(self, input_batch: Any) -> None:
        """Take the inputs of a step that runs without a full graph; waits for nothing."""
        self._choose(input_batch.num_reqs)
        bounds = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs]
        self.max_seq_len = int(bounds.max())

    def open_capture(self, requests: int) -> None:
        """Take the inputs of a captured step, whose requests may become as long as any."""
        self._choose(requests)
        self.max_seq_len = self._most_tokens

    def for_kernel(self, batch: GpuWindowBatch, table: int) -> StepRequests:
        """The requests of the step in flight, with the staged rows of a window."""
        views = self.views
        starts, ends = batch.staged_start, batch.staged_end
        if starts is None or ends is None:
            starts, ends = views.row_start, views.row_end
        table_of_layer = views.block_tables[table]
        return StepRequests(views.query_start_loc, views.seq_lens, table_of_layer, starts, ends)

    def tables(self, name: str, requests: int) -> tuple[Tensor, Tensor]:
        """Tokens of each request and the block table of a layer, of the step in flight."""
        self._choose(requests)
        return self.views.seq_lens, self.views.block_tables[self.table_of[name]]

    def _choose(self, requests: int) -> None:
        views = self._views.get(requests)
        if views is None:
            offsets = self._query_start_loc
            views = self._views[requests] = StepViews(
                offsets[: requests + 1],
                offsets[:requests],
                offsets[1 : requests + 1],
                self._seq_lens[:requests],
                tuple(table[:requests] for table in self._block_tables),
            )
        self.views = views


class StagedLayer:
    """One target layer.

    Args:
        number: number of the layer whose K/V it reads, which is its own unless it shares them.
        table: number of the layer's block table among them.
    """

    def __init__(
        self,
        number: int,
        layer: Any,
        window: Window,
        staging: GpuStaging,
        inputs: StepInputs,
        table: int,
    ):
        self._number = number
        self._layer = layer
        self._window = window
        self._set, self._place = staging.place(number)
        self._slot_row = staging.layers[number].slot_row
        self._inputs = inputs
        self._table = table
        self._staging = staging
        self._causal = causal_implementation(layer.impl)
        self._stock_write: Callable[..., Any] | None = None
        self._stock_attention: Callable[..., Any] | None = None
        self.rules = ScoreRules(float(self._causal.scale))
        """How our kernels weigh tokens."""

    @property
    def trace(self) -> LayerTrace | None:
        """Records this window's inputs and outputs, if it is checked."""
        return self._staging.trace

    @property
    def layer(self) -> Any:
        """vLLM's."""
        return self._layer

    @property
    def name(self) -> str:
        """vLLM's name of it."""
        return str(self._layer.layer_name)

    @property
    def owner(self) -> str:
        """Name of the layer whose K/V it reads; its own, unless it shares them."""
        return self._staging.layers[self._number].name

    def cache_rows(self) -> Tensor:
        """[blocks, kv_heads, block_size, K + V width], the cache that it reads."""
        return self._staging.layers[self._number].kv_cache

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """K and V of the window's rows, where they are staged."""
        return self._set.keys[self._place], self._set.values[self._place]

    def scales(self, query: Tensor) -> Scales:
        """Scales of these queries and of the layer's cache."""
        raise NotImplementedError

    def step(
        self,
        batch: GpuWindowBatch,
        query: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        query_pe: Tensor | None = None,
    ) -> AttentionStep:
        """Arguments of our kernels for the window in flight."""
        requests, most = self._inputs.for_kernel(batch, self._table), self._inputs.max_seq_len
        rows, scales = batch.max_query_len, self.scales(query)
        return AttentionStep(
            query, *self.held, kv_cache, requests, output, self.rules, rows, most, scales, query_pe
        )

    def slots_to_write(self, key: Tensor, value: Tensor, slots: Tensor) -> Tensor | None:
        """Stage the step's rows if a window asks for it; the slots that are to be written at once.

        Args:
            key, value: [rows, heads, width] as they would be written; latents as K and V of one
                head.
            slots: [rows] int64, stock's slots of the layer.

        Returns:
            Slots for the stock write, -1 for staged rows; None: nothing is written.
        """
        window = self._window
        staged = window.is_staging and window.stage(self._number, key, value)
        if not staged or window.is_control:
            return slots
        batch = window.batch
        assert isinstance(batch, GpuWindowBatch)
        return None if batch.direct_slots is None else batch.direct_slots_of[self._slot_row]
