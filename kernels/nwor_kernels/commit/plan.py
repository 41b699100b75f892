"""The commit of a window: tables of every layer's sources and caches on the device, the launch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from nwor_kernels.commit.kernel import commit_kernel
from nwor_kernels.commit.with_update import RequestStates, Update, commit_and_update_with
from nwor_kernels.fp8 import E4M3_CACHE_DTYPES
from nwor_kernels.launch import Launch, starts_early
from nwor_kernels.tiles import check_chunk, tiling

FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
"""Dtypes of K and V that a commit reads, in Triton's words."""

_CACHE_ELEMENTS = {**FLOATS, **dict.fromkeys(E4M3_CACHE_DTYPES, tl.float8e4nv)}

MANY_ROWS = 8192
"""Rows x layers from which a program takes two rows: the GPU is full without more programs."""


class StagedSources:
    """Where a commit reads: the addresses of every layer's K and V rows on the device.

    It holds addresses only: keep the tensors alive while it is used. Building it waits for a copy
    to the device, so build it outside any graph capture.

    Args:
        keys: one tensor a layer, [rows, kv_heads, head_dim]; all of one dtype, shape and strides.
        values: likewise, [rows, kv_heads, value_head_dim], of the dtype of the keys.

    Raises:
        ValueError: tensors that one launch cannot serve.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]):
        for name, tensors in (("keys", keys), ("values", values)):
            layouts = {(t.dtype, t.device, t.stride(), t.shape) for t in tensors}
            if len(layouts) != 1:
                raise ValueError(
                    f"{name} of all layers must share dtype, device, strides and shape: {layouts}"
                )
        known_element(keys[0].dtype, FLOATS, "keys")
        if len(keys) != len(values) or keys[0].dtype != values[0].dtype:
            raise ValueError(
                f"{len(keys)} keys of {keys[0].dtype} and {len(values)} values of "
                f"{values[0].dtype}: one of each a layer, of one dtype"
            )
        if keys[0].shape[:2] != values[0].shape[:2]:
            raise ValueError(
                f"keys are {tuple(keys[0].shape)} and values {tuple(values[0].shape)}: rows and "
                "heads must be the same"
            )
        self.num_layers = len(keys)
        self.dtype = keys[0].dtype
        _, self.kv_heads, self.key_dim = keys[0].shape
        self.value_dim = values[0].shape[2]
        self._addresses = self._take(keys, values)
        self.table = torch.tensor(self._addresses, dtype=torch.int64, device=keys[0].device)

    def refill(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Point the same table at other tensors, without waiting for the copy.

        For eager mode, in which every step may bring other addresses; equal ones are not copied.
        Rows and strides may change too, but a captured launch keeps the old ones. Only the first
        layer's layout is read, to save host time: all layers must share it.

        Raises:
            ValueError: other layers, heads, head dims or dtype than this was built for.
        """
        kept = (self.num_layers, self.num_layers, self.dtype, self.kv_heads)
        given = (len(keys), len(values), keys[0].dtype, keys[0].shape[1])
        dims = (keys[0].shape[2], values[0].shape[2])
        if given != kept or dims != (self.key_dim, self.value_dim):
            raise ValueError(
                f"{len(keys)} keys {tuple(keys[0].shape)} {keys[0].dtype} and {len(values)} values "
                f"{tuple(values[0].shape)} cannot take the place of {self.num_layers} layers of "
                f"{self.kv_heads} heads of {self.key_dim} and {self.value_dim} in {self.dtype}"
            )
        addresses = self._take(keys, values)
        if addresses == self._addresses:
            return
        self._addresses = addresses
        # PyTorch reuses pinned memory only after this copy has finished.
        on_host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.table.is_cuda)
        self.table.copy_(on_host, non_blocking=True)

    def _take(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Remember the layout of the first layer; the addresses of all."""
        self.num_rows = min(keys[0].shape[0], values[0].shape[0])
        self.key_strides = keys[0].stride()
        self.value_strides = values[0].stride()
        addresses = [
            (key.data_ptr(), value.data_ptr()) for key, value in zip(keys, values, strict=True)
        ]
        self.alignment = alignment_of(address for pair in addresses for address in pair)
        self.layout = (
            (self.num_layers, self.kv_heads, self.dtype),
            (self.key_dim, *self.key_strides),
            (self.value_dim, *self.value_strides),
            self.alignment,
        )
        return addresses


@dataclass(frozen=True)
class CommitRows:
    """The rows of a commit, and how many of each request's a count accepts.

    Row i copies source row i (or `rows[i]`) to slot `slots[i]` of every layer (with slot rows:
    `slots[slot_rows[layer], i]`) if its place in its request's window is below the request's count
    plus `certain`.
    """

    slots: Tensor
    """[N] int64, block * block_size + offset; negative is padding and never indexed. With slot rows
    [groups, N], one row a KV-cache group."""
    tokens_per_request: int | None = None
    """Rows of each window (drafts + 1), if all windows are equal."""
    row_request: Tensor | None = None
    """Otherwise [N] int32, the request of each row; negative is padding."""
    row_index: Tensor | None = None
    """[N] int32, the place of each row in its request's window."""
    rows: Tensor | None = None
    """[N] int, the row's place in the sources; negative is never written."""
    certain: int = 0
    """Rows of each request that its count leaves out; -1 if it counts one that is not here."""


class CommitPlan:
    """The caches of all target layers, ready to be committed to.

    It holds addresses only: keep caches and scales alive while it is used. Building it copies a
    table to the device, so build it outside any graph capture.

    Args:
        kv_caches: one tensor a layer, [blocks, kv_heads, block_size, head_dim +
            value_head_dim]; dtype, strides and all sizes but `blocks` the same in every layer.
            uint8 and float8_e4m3fn caches are written quantised: see `quantize_e4m3`.
        k_scales, v_scales: one float32 tensor a layer on the device, [1] or [kv_heads]; for fp8
            caches, and read anew by every commit.
        slot_rows: for layers of several KV-cache groups: layer i writes to `slots[slot_rows[i]]`
            of the slots [groups, N] that a commit is given. None: slots are [N], one group.

    Raises:
        ValueError: caches, scales or slot rows that one launch cannot serve.
    """

    def __init__(
        self,
        kv_caches: Sequence[Tensor],
        k_scales: Sequence[Tensor] | None = None,
        v_scales: Sequence[Tensor] | None = None,
        slot_rows: Sequence[int] | None = None,
    ):
        layouts = {(c.dtype, c.device, c.stride(), c.shape[1:]) for c in kv_caches}
        if len(layouts) != 1:
            raise ValueError(f"kv_caches must share dtype, device, strides and shape: {layouts}")
        first = kv_caches[0]
        self._element = known_element(first.dtype, _CACHE_ELEMENTS, "kv_caches")
        _, self.kv_heads, self.block_size, self.width = first.shape
        self.num_layers = len(kv_caches)
        scales = [
            _scale_column(name, given, first, self.num_layers)
            for name, given in (("k", k_scales), ("v", v_scales))
        ]
        self._num_scales = [number for number, _ in scales]
        self._strides = first.stride()
        addresses = [cache.data_ptr() for cache in kv_caches]
        self._alignment = alignment_of(addresses)
        slots = [cache.shape[0] * self.block_size for cache in kv_caches]
        table = list(zip(addresses, slots, *(column for _, column in scales), strict=True))
        self._table = torch.tensor(table, dtype=torch.int64, device=first.device)
        self._slot_groups, self._slot_rows = _slot_row_column(
            slot_rows, self.num_layers, first.device
        )
        self._launches: dict[object, Launch] = {}

    def commit_windows(
        self,
        sources: StagedSources,
        rows: CommitRows,
        num_sampled: Tensor,
        errors: Tensor,
        *,
        layer_metadata: Tensor | None = None,
        written: Tensor | None = None,
    ) -> None:
        """Write the accepted rows of all layers in one launch.

        All or nothing: a bad slot or row in any layer, accepted or not, commits nothing; padding is
        ignored. Never waits; safe in a CUDA graph.

        Args:
            sources: K and V of every layer.
            num_sampled: [requests] int32, accepted rows of each request: in vLLM's `num_sampled`
                the certain first token and the accepted drafts. A request past its end (padding
                of a captured shape) commits nothing.
            errors: [layers] int32; ERROR_* flags are or-ed in and never cleared.
            layer_metadata: [layers, 2] int32 as the stage kernel wrote it: if a layer staged
                another number of rows, or has a flag, nothing is committed.
            written: [layers] int32; the rows stored in each layer are added. Counters in one
                cache line delay each other.

        Raises:
            ValueError: sources do not fit the caches, or the request of a row is given in both
                ways or in neither.
        """
        slots, of_rows = rows.slots, (rows.row_request, rows.row_index, rows.rows)
        small = (num_sampled, *of_rows, errors, layer_metadata, written)
        tensors = (slots, *small)
        layouts = [None if t is None else (t.dtype, t.stride()) for t in tensors]
        key = (slots.shape, rows.tokens_per_request, rows.certain, sources.layout, *layouts)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._prepare(sources, rows, small)
        launch(
            sources.table,
            self._table,
            slots,
            self._slot_rows,
            *small,
            slots.shape[-1],
            sources.num_rows,
            num_sampled.numel(),
        )

    def bind(
        self,
        sources: StagedSources,
        rows: CommitRows,
        errors: Tensor,
        written: Tensor | None = None,
    ) -> Callable[[Tensor], None]:
        """`commit_windows` for equal windows with all but the counts fixed: the least host time.

        The tensors must stay in place.

        Returns:
            The commit, given [requests] int32 on the device, contiguous.
        """
        slots, small = rows.slots, (errors, None, None, None, errors, None, written)
        launch = self._prepare(sources, rows, small)
        tables = (sources.table, self._table, slots, self._slot_rows)
        after = (*small[1:], slots.shape[-1], sources.num_rows)
        bound = launch.bind(*tables, *after, at=len(tables))

        def commit(num_sampled: Tensor) -> None:
            _check_counts(num_sampled)
            bound(num_sampled, num_sampled.numel())

        return commit

    def bind_with_update(
        self,
        sources: StagedSources,
        rows: CommitRows,
        errors: Tensor,
        *,
        written: Tensor | None,
        update: Any,
        states: RequestStates,
    ) -> Update:
        """`bind`, and vLLM's update of the step's requests in the same launch.

        Args:
            update: vLLM's `triton.jit` function of UPDATE_ARGUMENTS.
            states: the tensors that it changes.

        Returns:
            The launch, given tensors of the dtypes and strides of its first call. Counts are
            contiguous int32.
        """
        slots, small = rows.slots, (errors, None, None, None, errors, None, written)
        launch = self._prepare(sources, rows, small, commit_and_update_with(update))
        tables = (sources.table, self._table, slots, self._slot_rows, errors, written)
        sizes = slots.shape[-1], sources.num_rows
        bound = partial(launch, *tables, *sizes, *states.as_arguments())

        def commit_and_update(
            idx_mapping: Tensor,
            sampled_tokens: Tensor,
            num_sampled: Tensor,
            num_rejected: Tensor,
            query_start_loc: Tensor,
        ) -> None:
            _check_counts(num_sampled)
            requests = idx_mapping.shape[0]
            bound(idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc, requests)

        return commit_and_update

    def _prepare(
        self,
        sources: StagedSources,
        rows: CommitRows,
        small: tuple[Tensor | None, ...],
        updating: Any = None,
    ) -> Launch:
        """Check the arguments that all launches of a kind share, and choose the kernel's tiles.

        Args:
            small: the kernel's arguments from the counts on.
            updating: the kernel that updates requests too; each needs a program.
        """
        slots, tokens_per_request = rows.slots, rows.tokens_per_request
        layer_metadata, written = small[5:]
        by_index = rows.row_request is not None
        if (tokens_per_request is not None) == by_index or by_index != (rows.row_index is not None):
            raise ValueError("give either tokens_per_request or row_request and row_index")
        self._check_fit(sources)
        self._check_slots(slots)
        heads, key_dim, value_dim = sources.kv_heads, sources.key_dim, sources.value_dim
        num_rows = slots.shape[-1]
        many = num_rows * self.num_layers >= MANY_ROWS
        tile = tiling(num_rows, heads * max(key_dim, value_dim), 2 if many else 1)
        strides = [0 if tensor is None else tensor.stride(0) for tensor in small[:6]]
        strides = [slots.stride(-1), *strides]
        metadata_stride = 0 if layer_metadata is None else layer_metadata.stride(1)
        written_stride = 0 if written is None else written.stride(0)
        starts = starts_early(slots.device)
        constants = {
            "STRIDES": (*strides, metadata_stride, slots.stride(0), written_stride),
            "KEY_STRIDES": sources.key_strides,
            "VALUE_STRIDES": sources.value_strides,
            "CACHE_STRIDES": self._strides,
            "SOURCE_ELEMENT": FLOATS[sources.dtype],
            "CACHE_ELEMENT": self._element,
            "SOURCE_ALIGNMENT": sources.alignment,
            "CACHE_ALIGNMENT": self._alignment,
            "K_SCALES": self._num_scales[0],
            "V_SCALES": self._num_scales[1],
            "TOKENS_PER_REQUEST": tokens_per_request,
            "CERTAIN": rows.certain,
            "BLOCK_SIZE": self.block_size,
            "HEADS": heads,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "NUM_LAYERS": self.num_layers,
            "SLOT_GROUPS": self._slot_groups,
            "TOKENS": tile.tokens,
            "COLUMNS": tile.columns,
            "CHUNK": check_chunk(num_rows),
            "STARTS_EARLY": starts,
        }
        grid = (*tile.grid, self.num_layers)
        if updating is not None:
            assert tokens_per_request is not None
            requests = num_rows // tokens_per_request
            grid = (max(tile.grid[0], requests), tile.grid[1], self.num_layers + 1)
        return Launch(
            updating or commit_kernel,
            grid,
            constants,
            num_warps=tile.num_warps,
            num_stages=1,
            launch_pdl=starts,
        )

    def _check_fit(self, sources: StagedSources) -> None:
        width = sources.key_dim + sources.value_dim
        given = (sources.num_layers, sources.kv_heads, width)
        if given != (self.num_layers, self.kv_heads, self.width):
            raise ValueError(
                f"{sources.num_layers} layers of {sources.kv_heads} heads with K and V of "
                f"{sources.key_dim} and {sources.value_dim} do not fit {self.num_layers} caches "
                f"of {self.kv_heads} heads and width {self.width}"
            )

    def _check_slots(self, slots: Tensor) -> None:
        expected = 2 if self._slot_groups else 1
        if slots.dim() != expected or (expected == 2 and slots.shape[0] < self._slot_groups):
            raise ValueError(
                f"slots of shape {tuple(slots.shape)} do not fit a plan of "
                f"{self._slot_groups or 'no'} slot rows: [N] without them, else [groups, N]"
            )


def _check_counts(num_sampled: Tensor) -> None:
    if num_sampled.dtype is not torch.int32 or not num_sampled.is_contiguous():
        raise ValueError(f"counts must be contiguous int32, not {num_sampled.dtype}")


def _slot_row_column(
    slot_rows: Sequence[int] | None, num_layers: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """(Rows of slots that layers name, [layers] int64 on the device); (0, None) for one group.

    Raises:
        ValueError: not one row a layer.
    """
    if slot_rows is None:
        return 0, None
    if len(slot_rows) != num_layers or min(slot_rows) < 0:
        raise ValueError(f"{num_layers} layers need a row of slots each, not {slot_rows}")
    return max(slot_rows) + 1, torch.tensor(slot_rows, dtype=torch.int64, device=device)


def _scale_column(
    name: str, scales: Sequence[Tensor] | None, cache: Tensor, num_layers: int
) -> tuple[int, list[int]]:
    """(Scales of a layer, address of each layer's); 0 if the cache is not quantised.

    `name` is k or v, `cache` the first layer's. Raises ValueError for scales that do not fit.
    """
    if cache.dtype not in E4M3_CACHE_DTYPES:
        if scales is not None:
            raise ValueError(f"{name}_scales are for fp8 caches; kv_caches are {cache.dtype}")
        return 0, [0] * num_layers
    kv_heads = cache.shape[1]
    layouts = {(s.dtype, s.device, s.numel(), s.is_contiguous()) for s in scales or ()}
    if (
        scales is None
        or len(scales) != num_layers
        or len(layouts) != 1
        or not any((torch.float32, cache.device, n, True) in layouts for n in (1, kv_heads))
    ):
        raise ValueError(
            f"an fp8 cache needs {name}_scales, one contiguous float32 tensor a layer with 1 "
            f"or {kv_heads} elements on {cache.device}: {layouts or scales}"
        )
    return scales[0].numel(), [scale.data_ptr() for scale in scales]


def known_element(dtype: torch.dtype, known: Mapping[torch.dtype, Any], name: str) -> Any:
    """Triton's name of a dtype; the ValueError lists the known dtypes."""
    if dtype not in known:
        raise ValueError(f"{name} are {dtype}; commit knows {', '.join(map(str, known))}")
    return known[dtype]


def alignment_of(addresses: Iterable[int]) -> int:
    """Bytes that all addresses are known to be multiples of, for wide loads and stores."""
    return 16 if all(address % 16 == 0 for address in addresses) else 1
