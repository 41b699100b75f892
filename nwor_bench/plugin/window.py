"""The life of one window: begin -> stage -> accept -> commit, or abort. Knows no vLLM.

The runner hook drives the life cycle; attention only stages. After any error the cache is as stock
vLLM would have left it: a window is committed in every layer, or every staged draft token is
written directly before it is read.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor

logger = logging.getLogger("vllm.nwor_bench")


@dataclass(frozen=True)
class WindowBatch:
    """The draft tokens of one step, and where their K/V go."""

    num_draft_tokens: tuple[int, ...]
    """Drafts of each request in batch order; 0 for a request that only prefills."""
    rows: Tensor
    """[N] int64, the staged tokens' rows in the batch."""
    slots: Tensor
    """Their cache slots, int64: [N], or [groups, N] for several KV-cache groups (`SlotRows`)."""
    direct_slots: Tensor | None
    """[num_tokens] or [groups, num_tokens] int64, the slots to write at once: the step's, with -1
    for staged tokens. None: the whole step waits for the commit."""

    @cached_property
    def total(self) -> int:
        """Draft tokens of the window."""
        return sum(self.num_draft_tokens)

    @cached_property
    def direct_slots_of(self) -> tuple[Tensor, ...]:
        """`direct_slots` of each KV-cache group, [num_tokens]; they must not be None."""
        slots = self.direct_slots
        assert slots is not None
        return (slots,) if slots.dim() == 1 else slots.unbind()

    def fits(self, accepted: Tensor) -> bool:
        """True if this acceptance has the shape of this window's: a mask of its staged rows."""
        return accepted.shape == self.rows.shape


NOT_FINISHED = "step_not_finished"
"""Fallback reason of a window whose step died between its calls."""


class WindowError(RuntimeError):
    """The life cycle was called out of order: a bug in a hook, never bad data."""


class HeldValuesLost(WindowError):
    """Held K/V were overwritten: nothing can be written, and the step must stop."""


class State(Enum):
    """The states of a window."""

    IDLE = "idle"
    OPEN = "open"
    ACCEPTED = "accepted"
    DIRECT = "direct"
    COMMITTED = "committed"


class Staging(Protocol):
    """Holds a window's K/V. Methods return an empty string, or why they failed."""

    num_layers: int

    def reset(self) -> None:
        """Release the last window's tensors; called as each window ends."""

    def stage(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
        """Hold the rows' K/V of one layer."""

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        """Write the accepted rows of all layers, or nothing."""

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        """Write every staged row of these layers to the cache."""


@dataclass
class LayerCall:
    """One layer's inputs and output in the latest forward; None if it had none."""

    key: Tensor | None = None
    """[rows, kv_heads, head_dim], K as the layer would write it."""
    value: Tensor | None = None
    """[rows, kv_heads, value_dim]."""
    query: Tensor | tuple[Tensor, ...] | None = None
    """[rows, heads, head_dim], or the parts of a latent layer's query."""
    output: Tensor | None = None
    """[rows, heads, value_dim], our attention's output."""
    is_merged: bool = False
    """Stock attended the committed tokens, and the window's rows were merged into its output."""
    is_causal: bool = True
    """If the output is merged: stock's mask was causal and ended with the committed tokens."""


@dataclass
class LayerTrace:
    """Calls of all target layers, by name: inputs in front of our wrappers, outputs behind them."""

    calls: dict[str, LayerCall] = field(default_factory=dict)

    def of(self, name: str) -> LayerCall:
        """The layer's call, made at its first use."""
        return self.calls.setdefault(name, LayerCall())

    def wrote(self, name: str, key: Tensor, value: Tensor) -> None:
        """Copy the K and V that vLLM gives a layer to write."""
        call = self.of(name)
        call.key, call.value = key.clone(), value.clone()

    def asked(self, name: str, query: Tensor | tuple[Tensor, ...]) -> None:
        """Copy the queries that vLLM gives a layer's attention, which has no output yet."""
        call = self.of(name)
        call.query = query.clone() if isinstance(query, Tensor) else tuple(q.clone() for q in query)
        call.output = None

    def attended(
        self, name: str, output: Tensor, *, is_merged: bool = False, is_causal: bool = True
    ) -> None:
        """Copy the output of a layer's attention."""
        call = self.of(name)
        call.output = output.clone()
        call.is_merged, call.is_causal = is_merged, is_causal


class WindowOutcome(NamedTuple):
    """How a window ended; `fallback_reason` is None when it was committed."""

    staged_tokens: int
    fallback_reason: str | None
    control_tokens: int = 0
    """Drafts of a control window: written directly, and read from the window."""


@dataclass
class Window:
    """The window in flight; one object serves every window of an engine."""

    staging: Staging
    state: State = State.IDLE
    batch: WindowBatch | None = None
    _staged_layers: set[int] = field(default_factory=set)
    _accepted: Tensor | None = None
    _reason: str | None = None
    _repeats: bool = False
    is_control: bool = False
    """True for a window of mode control: every layer stages and writes its drafts at once."""
    _every_layer: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self._every_layer = set(range(self.staging.num_layers))  # never changed, only pointed at

    @property
    def is_staging(self) -> bool:
        """True while attention must stage instead of write."""
        return self.state is State.OPEN

    @property
    def staged_every_layer(self) -> bool:
        """True once all target layers have staged (in the latest run, if runs repeat)."""
        return len(self._staged_layers) == self.staging.num_layers

    def has_staged(self, layer: int) -> bool:
        """True if this layer's K/V of this very window are held (in the latest run)."""
        return layer in self._staged_layers

    def begin(self, batch: WindowBatch, *, repeats: bool = False, control: bool = False) -> None:
        """Open a window; raises WindowError if one is still in flight.

        Args:
            repeats: a graph capture runs the forward more than once: a layer may stage again.
            control: each layer writes its drafts too, so nothing is committed.
        """
        if self.state is not State.IDLE:
            raise WindowError(f"begin() while a window is {self.state.value}")
        self.batch = batch
        self.state = State.OPEN
        self._repeats = repeats
        self.is_control = control

    def forget(self) -> None:
        """Drop the window without `close`: its caller knows the outcome, or it was a capture's."""
        self.staging.reset()
        self.state = State.IDLE
        self.batch = self._accepted = self._reason = None
        self._staged_layers = set()

    def stage(self, layer: int, key: Tensor, value: Tensor) -> bool:
        """Hold one layer's drafts. False: the window fell back, write this layer directly."""
        if self.state is not State.OPEN or self.batch is None:
            raise WindowError(f"stage() while the window is {self.state.value}")
        if layer in self._staged_layers and not self._repeats:
            problem = "layer_staged_twice"
        else:
            if layer in self._staged_layers:
                self._staged_layers = set()  # another run of the forward begins
            problem = _attempt(self.staging.stage, layer, key, value, self.batch.rows)
        if problem:
            self.abort(f"stage:{problem}")
            return False
        self._staged_layers.add(layer)
        return True

    def replayed(self) -> None:
        """A captured graph ran the forward: it staged every layer without calling stage()."""
        if self.state is not State.OPEN:
            raise WindowError(f"replayed() while the window is {self.state.value}")
        self._staged_layers = self._every_layer

    def accept(self, accepted: Tensor) -> bool:
        """Take what was accepted, as the staging's commit wants it. False: the window fell back."""
        if self.state is State.DIRECT:
            return False
        if self.state is not State.OPEN or self.batch is None:
            raise WindowError(f"accept() while the window is {self.state.value}")
        if not self.staged_every_layer:
            self.abort("accept:layer_not_staged")
            return False
        if not self.batch.fits(accepted):
            self.abort("accept:mask_shape")
            return False
        self._accepted = accepted
        self.state = State.ACCEPTED
        return True

    def commit(self) -> bool:
        """Write the accepted drafts to every layer. False: the window fell back."""
        if self.state is State.DIRECT:
            return False
        if self.state is not State.ACCEPTED or self.batch is None or self._accepted is None:
            raise WindowError(f"commit() while the window is {self.state.value}")
        problem = _attempt(self.staging.commit, self.batch.slots, self._accepted)
        if problem:
            self.abort(f"commit:{problem}")
            return False
        self.state = State.COMMITTED
        return True

    def commit_replayed(self, write: Callable[..., str], *arguments: Any) -> bool:
        """Accept and commit in one: `write` decides, and writes every layer. False: it fell back.

        For a window that a captured graph ran, so that every layer has staged.
        """
        if self.state is State.DIRECT:
            return False
        if self.state is not State.OPEN or self._staged_layers is not self._every_layer:
            raise WindowError(f"commit_replayed() while the window is {self.state.value}")
        problem = _attempt(write, *arguments)
        if problem:
            self.abort(f"commit:{problem}")
            return False
        self.state = State.COMMITTED
        return True

    def abort(self, reason: str) -> None:
        """Return to direct mode with the cache valid; allowed at any point before commit."""
        if self.state in (State.IDLE, State.DIRECT):
            return
        if self.state is State.COMMITTED or self.batch is None:
            raise WindowError("abort() after commit")
        # A control's layers have written as they staged; a capture's tokens are not real.
        if not (self.is_control or self._repeats):
            self.staging.write_directly(sorted(self._staged_layers), self.batch.slots)
        self.state = State.DIRECT
        self._reason = reason

    @property
    def fallback_reason(self) -> str | None:
        """Why the window in flight is written directly; None if it is not."""
        return self._reason if self.state is State.DIRECT else None

    def withdraw(self, reason: str) -> None:
        """Fall back because a rank did: write every draft to the cache and count `reason`.

        Committed tokens are written again with the same values, and the rejected drafts with
        them, as stock vLLM writes them.
        """
        if self.state not in (State.COMMITTED, State.DIRECT) or self.batch is None:
            raise WindowError(f"withdraw() while the window is {self.state.value}")
        if self.state is State.COMMITTED:
            self.staging.write_directly(sorted(self._staged_layers), self.batch.slots)
            self.state = State.DIRECT
        self._reason = reason

    def end_control(self) -> None:
        """All is written and nothing to commit; it falls back if a layer did not stage."""
        if self.state is State.DIRECT:
            return
        if self.state is not State.OPEN or not self.is_control:
            raise WindowError(f"end_control() while the window is {self.state.value}")
        if not self.staged_every_layer:
            self.abort("accept:layer_not_staged")
            return
        self.state = State.COMMITTED

    def close(self) -> WindowOutcome:
        """End the window and return its outcome; raises WindowError if it is not decided."""
        if self.state not in (State.COMMITTED, State.DIRECT) or self.batch is None:
            raise WindowError(f"close() while the window is {self.state.value}")
        if self.state is State.COMMITTED and self.is_control:
            outcome = WindowOutcome(0, None, control_tokens=self.batch.total)
        elif self.state is State.COMMITTED:
            outcome = WindowOutcome(self.batch.total, None)
        else:
            outcome = WindowOutcome(0, self._reason)
        # Now, not as the next window begins: by reference the K/V of the whole step are alive.
        self.forget()
        return outcome


def close_leftover(window: Window | None) -> str | None:
    """Close the window of a step that died; its fallback reason, also if none was open."""
    if window is None or window.batch is None:
        return NOT_FINISHED
    window.abort(NOT_FINISHED)
    return window.close().fallback_reason


def _attempt(action: Callable[..., str], *arguments: Any) -> str:
    """Run a staging action; an exception becomes a fallback reason, its traceback is logged."""
    try:
        return action(*arguments)
    except HeldValuesLost:
        raise
    except Exception as fault:
        logger.exception("staging failed; the window is written directly")
        return type(fault).__name__
