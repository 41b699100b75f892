"""Recurrent states of the window in flight: verified without a write, committed once. Gated delta
nets only.

Stock writes the state after every token of a window, each to a slot of its own, and the next window
reads the one behind the last accepted token. Staged, a layer verifies its window from that state,
writes none, and keeps records of its tokens; when the accepted tokens are known, one launch writes
one state a request and layer, to the slot that the next window reads, stock's or ours. So modes may
change at any window. The convolution's inputs stay stock's. Engines with one state slot a request
are a case of this (`one_slot_states`).

The decision is the K/V window's: a layer stages while that is open (mode control: it writes every
state, as stock does). Once a layer has staged, its state is committed whatever becomes of the K/V:
its records hold all that is needed, and counts are vLLM's own.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_bench.instruments.contract import CONTRACT, Feature
from nwor_bench.plugin.layers import StagingUnavailable, logger
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.state_layers import StateLayer, shape_of, token_bytes
from nwor_bench.plugin.state_rings import StateRings
from nwor_bench.plugin.window import Window
from nwor_bench.records import fallback_reasons as reasons
from nwor_bench.records.fallback_reasons import Fault
from nwor_kernels.gated_delta.records import (
    GatedNorm,
    WindowInputs,
    WindowRecords,
    allocate_records,
)
from nwor_kernels.gated_delta.reference import commit_states_reference


@dataclass(frozen=True, eq=False)
class StateTables:
    """Where the states of a step lie, for its commit."""

    indices: tuple[Tensor, ...]
    """[requests, k + 1] int32 of each group, the slot of the state behind each token."""
    accepted: Tensor
    """[requests] int32, tokens that the window before left."""

    @cached_property
    def place(self) -> tuple[tuple[int, ...], ...]:
        """Address and layout of each group's indices: vLLM keeps them in buffers of its own."""
        return tuple((t.data_ptr(), t.stride(0), *t.shape) for t in self.indices)


Commit = Callable[..., None]
"""Writes the states, given tokens that the window before left and those that are committed; with
rings also the rows that the next window needs."""


class StateKernels(NamedTuple):
    """What verifies a layer's window, and what commits those of all (`gated_delta.reference`)."""

    verify: Callable[..., None]
    commit: Callable[..., Commit]
    """Makes the commit of these states, groups, indices of each group, records and rings."""
    trace_patches: Callable[["WindowStates"], list[Patch]]
    """Tell the trace what vLLM gives each layer; in place while windows are checked."""


def reference_commit(*given: Any) -> Commit:
    """A commit in plain torch of what `StateKernels.commit` is given."""
    return partial(commit_states_reference, *given)


MAX_COMMITS = 256
"""Commits kept for the steps to come, each for a place of the indices."""


class StateOutcome(NamedTuple):
    """What became of the states in one window."""

    layers: int
    """Layers whose states the commit wrote; 0 if stock wrote them all."""
    reason: str | None
    """Why stock wrote them though the window was staged, or why the commit failed at first."""


class WindowStates:
    """The states of one worker; one object serves every window.

    Args:
        window: decides whether a step is staged.
        length: most tokens of a request's window, k + 1.
        requests: most requests of a window; with more it is left to stock.
        dtype: of the convolution's output.
    """

    rings: StateRings | None = None
    rows: int | None = None
    """Requests of the last commit, if they were not all of the step's."""
    _writes: tuple[bool, ...] = False, True
    """What the kernel's `write_states` may be."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        window: Window,
        *,
        length: int,
        requests: int,
        dtype: torch.dtype,
        kernels: StateKernels,
    ):
        self.layers = list(layers)
        self.requests = requests
        self.unavailable: str | None = None
        """Why stock writes every state; None if they are staged."""
        self.trace: Any = None
        """A `StateTrace` while a window is checked."""
        self._tracing = PatchSet(())
        self._window = window
        self._length = length
        self._dtype = dtype
        self._kernels = kernels
        self._records: WindowRecords | None = None
        self._groups = [layer.group for layer in self.layers]
        self._sizes = len(self.layers), requests, length
        self._options: dict[str, Any] = {}
        """Further arguments of the kernel that verifies."""
        self._room: tuple[int, ...] = ()
        """Further arguments of a commit."""
        self._commits: dict[tuple[tuple[int, ...], ...], Commit] = {}
        self._found: dict[int, Tensor] = {}
        self._accepted: Tensor | None = None
        self._staged: list[int] = []
        self._tables: StateTables | None = None
        self._reason: str | None = None
        self._windows: Tensor | None = None  # [requests] bool, in a step with a prefill

    # Before the first window.

    @property
    def bytes_per_request(self) -> int | None:
        """Bytes of one request's states that a commit writes; None if the device decides which."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's records in all layers."""
        return token_bytes(self.layers, self._dtype)

    @property
    def record_bytes(self) -> int:
        """Bytes of the record buffers."""
        _, requests, rows = self._sizes
        return self.token_bytes * requests * rows

    def allocate(self) -> str | None:
        """Allocate the records and run the kernels on padding once; why that failed, else None."""
        if self._records is not None or self.unavailable is not None:
            return self.unavailable
        first = self.layers[0]
        try:
            self._records = allocate_records(
                self._sizes,
                dtype=self._dtype,
                device=first.state.device,
                **shape_of(first),
            )
            self._warm_up()
        except Exception as fault:  # out of memory, or a kernel that does not compile
            logger.exception("nwor: recurrent states are left to stock vLLM")
            self.give_up(f"states:{type(fault).__name__}")
        return self.unavailable

    def give_up(self, reason: str | None) -> None:
        """Leave all states to stock for good; None: do nothing."""
        if reason is not None:
            self.unavailable, self._records = reason, None
            self._commits.clear()

    def _warm_up(self) -> None:
        """Run both kernels on a request without a slot: nothing is written."""
        first, device = self.layers[0], self.layers[0].state.device
        shape, rows = shape_of(first), self._length
        heads, width = shape["value_heads"], shape["value_dim"]
        channels = 2 * shape["key_heads"] * shape["key_dim"] + heads * width
        zeros = torch.zeros(rows, channels, dtype=self._dtype, device=device)
        gates = torch.zeros(rows, heads, dtype=self._dtype, device=device)
        out = torch.empty(rows, heads, width, dtype=self._dtype, device=device)
        slots = torch.zeros(1, rows, dtype=torch.int32, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        bounds = torch.tensor([0, rows], dtype=torch.int32, device=device)
        tables = StateTables((slots,) * (1 + max(self._groups)), one)
        for states in self._writes:
            parameters = first.layer.A_log, first.layer.dt_bias, first.state
            inputs = WindowInputs(zeros, gates, gates, *parameters, slots, one, bounds)
            self._run(0, inputs, out, None, states)
        self._commit_of(range(len(self.layers)), tables)(one, one, *self._room)
        self._commits.clear()

    def follow(self, trace: Any) -> None:
        """Copy what layers are given from now on into this `StateTrace`; None: no longer."""
        self._tracing.undo()
        self.trace = trace
        if trace is not None:
            self._tracing = PatchSet(self._kernels.trace_patches(self))
            self._tracing.apply()

    # While the forward runs.

    def stages(self, metadata: Any, unknown: Collection[str] = ()) -> bool:
        """True if a layer with these metadata verifies the step's window by our kernel.

        Args:
            unknown: arguments of stock's call that its kernel, as we know it, does not have.
        """
        if not self._window.is_staging or self._records is None:
            return False
        reason = why_stock(metadata, self.requests) or strange_call(metadata, unknown)
        self._reason = self._reason or reason
        return reason is None

    def stages_whole(self, metadata: Any) -> bool:
        """True if a layer stages, and every row of the step is a window's."""
        return self.stages(metadata) and metadata.num_prefills == 0

    def verify(
        self,
        number: int,
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        metadata: Any,
        out: Tensor,
        norm: GatedNorm | None = None,
    ) -> None:
        """Compute one layer's window; call it only if `stages`.

        Args:
            number: the layer's place in `layers`.
            mixed: [tokens, 2 H K + HV V], q, k and v behind the convolution.
            a, b: [tokens, HV], the inputs of decay and beta.
            metadata: the layer's `GDNAttentionMetadata`.
            out: [tokens, HV, V], written.
            norm: Qwen3.5's gated norm, for a caller that leaves it to the kernel.
        """
        requests = metadata.num_spec_decodes
        indices = metadata.spec_state_indices_tensor[:requests]
        accepted = metadata.num_accepted_tokens[:requests]
        bounds = metadata.spec_query_start_loc[: requests + 1]
        layer, control = self.layers[number], self._window.is_control
        self._find_windows(metadata)
        parameters = layer.layer.A_log, layer.layer.dt_bias, layer.state
        inputs = WindowInputs(mixed, a, b, *parameters, indices, accepted, bounds)
        self._run(number, inputs, out, norm, control)
        if control:
            return
        if number in self._staged:  # a capture runs its forward again
            self.drop()
        self._staged.append(number)
        self._found[layer.group], self._accepted = indices, accepted

    def _find_windows(self, metadata: Any) -> None:
        """Note which of a step's rows are windows, if they are not all."""

    def _run(
        self,
        number: int,
        inputs: WindowInputs,
        out: Tensor,
        norm: GatedNorm | None,
        write_states: bool,
    ) -> None:
        assert self._records is not None
        self._kernels.verify(
            inputs, out, self._records.layer(number),
            scale=self.layers[number].layer.head_k_dim**-0.5, norm=norm, write_states=write_states,
            **self._options,
        )  # fmt: skip
        if self.trace is not None and self._windows is None:
            self.trace.verified(number, inputs.mixed, out)

    def captured(self) -> StateTables | str | None:
        """Where a captured forward's states lie, in buffers that vLLM fills before each replay.

        Returns:
            A reason if stock writes them; None: nothing is to be committed (mode control).

        Raises:
            StagingUnavailable: some layers staged, and others did not.
        """
        if not self._staged:
            return self._reason
        if len(self._staged) < len(self.layers):
            raise StagingUnavailable(reasons.STATES_NOT_CALLED)
        tables = self._collected()
        self._commit_of(self._staged, tables)  # made now: it waits for the device
        return tables

    def replayed(self, tables: StateTables | str | None) -> None:
        """A captured graph ran the forward with these tables."""
        if isinstance(tables, StateTables):
            self._staged, self._tables = list(range(len(self.layers))), tables
        else:
            self._reason = tables

    def current(self, number: int, slots: Tensor, rings: Tensor | None) -> Tensor:
        """A layer's states [slots, HV, V, K] in these slots and rings, before the next window."""
        return self.layers[number].state[slots]

    # Behind the samples.

    def commit(self, num_sampled: Tensor) -> StateOutcome:
        """Write the states of the layers that staged, and end the window.

        A request that got no token keeps the state behind its first one: vLLM reads there.

        Args:
            num_sampled: [requests] int32, tokens that each request got.
        """
        staged, reason = self._staged, self._reason
        if not staged:
            window = self._window
            if not (reason or self._records is None or window.is_control or window.fallback_reason):
                reason = reasons.STATES_NOT_CALLED
            self.drop()
            return StateOutcome(0, reason)
        tables = self._tables or self._collected()
        committed = num_sampled.clamp(min=1)
        try:
            self._commit_of(staged, tables)(tables.accepted, committed, *self._room)
        except Exception as fault:
            logger.exception("nwor: states are committed in plain torch")
            reason = f"{Fault.COMMIT}:states:{type(fault).__name__}"
            commit = self._made(staged, tables, reference_commit)
            commit(tables.accepted, committed, *self._room)
        self.drop()
        return StateOutcome(len(staged), reason)

    def drop(self) -> None:
        """Forget the window: its step died, or it was a capture's."""
        self._staged, self._tables, self._reason = [], None, None
        self._found, self._accepted, self._windows = {}, None, None

    def abandon(self) -> None:
        """`drop` the window of a step that died."""
        self.drop()

    def _collected(self) -> StateTables:
        """State tables of the step whose forward has run the layers."""
        assert self._accepted is not None
        some = next(iter(self._found.values()))
        groups = range(1 + max(self._groups))
        # A group none of whose layers staged is never looked at.
        return StateTables(tuple(self._found.get(group, some) for group in groups), self._accepted)

    def _commit_of(self, staged: Sequence[int], tables: StateTables) -> Commit:
        if len(staged) < len(self.layers):  # the window fell back while its forward ran
            return self._made(staged, tables, self._kernels.commit)
        place = tables.place
        commit = self._commits.get(place)
        if commit is None:
            if len(self._commits) >= MAX_COMMITS:
                self._commits.clear()
            commit = self._commits[place] = self._made(staged, tables, self._kernels.commit)
        return commit

    def _made(
        self, staged: Sequence[int], tables: StateTables, commit: Callable[..., Commit]
    ) -> Commit:
        assert self._records is not None
        layers, records = self.layers, self._records
        if len(staged) < len(layers):
            layers = [layers[number] for number in staged]
            records = WindowRecords(*(part[list(staged)] for part in records))
        states, groups = [layer.state for layer in layers], [layer.group for layer in layers]
        return commit(states, groups, tables.indices, records, self._options.get("rings"))


def why_stock(metadata: Any, requests: int) -> str | None:
    """Why stock serves a step with these metadata; None if every row is a window's."""
    if metadata.spec_sequence_masks is None:
        return reasons.STATES_WITHOUT_WINDOW
    if metadata.num_prefills > 0 or metadata.num_decodes > 0:
        return reasons.BESIDE_PREFILL
    if metadata.num_spec_decodes > requests:
        return reasons.STATES_OF_TOO_MANY
    return None


def strange_call(metadata: Any, unknown: Collection[str]) -> str | None:
    """Why stock's kernel is another one than is known, such as one with a ring of records: it is
    called with `unknown` arguments, or a field of the metadata that is not known is in use."""
    for name in unknown:
        return reasons.unsupported_states(f"argument_{name}")
    for field in _strange_fields(metadata.__class__):
        if getattr(metadata, field.name) is not field.default:
            return reasons.unsupported_states(f"metadata_{field.name}")
    return None


@cache
def _strange_fields(kind: Hashable) -> tuple[Field[Any], ...]:
    """Fields of a class of metadata that are not known."""
    known = CONTRACT[Feature.STATES].known["v1.attention.backends.gdn_attn:GDNAttentionMetadata"]
    found = fields(kind) if isinstance(kind, type) and is_dataclass(kind) else ()
    return tuple(field for field in found if field.name not in known)
