"""A recurrent layer's states, and the DRAM bytes of ways to keep them right if drafts are rejected.

vLLM keeps two states a layer: the recurrent one, [heads, rows, columns], and the last inputs of a
short convolution, [channels, kernel - 1 + drafts].

S is one state, r the inputs of one token's update. A step has k drafts and one certain token a
request; a of the drafts are accepted. Per request and layer:

- stock: vLLM's fused kernels read the state at the last accepted token and store one at every
  position: read S, write (k + 1) S. The next step reads the one that was accepted.
- one state: as if the window's states stayed on chip until acceptance is known: read S, write S.
  A lower bound; held in DRAM instead, committing one costs 2 S more than stock.
- replay, fused: keep the tokens' inputs; the next step updates the state by the accepted ones
  before its own window: read S + (a + 1) r, write S + (k + 1) r.
- replay, own launch: as a launch behind acceptance, which reads the state once more:
  read 2 S + (a + 1) r, write S + (k + 1) r.

The convolution's inputs cost the same in all of them: K - 1 columns read, K - 1 + k written.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecurrentState:
    """The state of one layer and request; sizes of elements in bits.

    Attributes:
        heads, rows, columns: the recurrent state.
        conv_channels, conv_kernel: the convolution before it.
        record_values: activations of one token from which its step can be run again.
        record_floats: such values that are kept in float32: decays and step sizes.
        parameters: matrix elements of the layer, for its weights.
    """

    kind: str
    heads: int
    rows: int
    columns: int
    conv_channels: int
    conv_kernel: int
    state_bits: int
    conv_bits: int
    record_values: int
    record_floats: int
    parameters: int

    @property
    def elements(self) -> int:
        """Elements of the recurrent state."""
        return self.heads * self.rows * self.columns

    def state_bytes(self, ranks: int = 1) -> float:
        """Bytes of one recurrent state on one rank: heads are split."""
        return self.elements * self.state_bits / 8 / ranks

    def conv_column_bytes(self, ranks: int = 1) -> float:
        """Bytes of the convolution's input of one token."""
        return self.conv_channels * self.conv_bits / 8 / ranks

    def record_bytes(self, activation_bits: int, ranks: int = 1) -> float:
        """Bytes from which one token's step can be run again."""
        return (self.record_values * activation_bits + self.record_floats * 32) / 8 / ranks


@dataclass(frozen=True)
class RecurrentLayers:
    """A model's recurrent layers: all of them have one state's shape."""

    count: int
    state: RecurrentState

    def state_bytes(self, ranks: int = 1) -> float:
        """Bytes of one request's recurrent state in all layers."""
        return self.count * self.state.state_bytes(ranks)

    def slot_bytes(self, draft_tokens: int, ranks: int = 1) -> float:
        """Bytes that vLLM reserves a request: a state for each of k + 1 tokens, and inputs.

        `MambaBase.get_kv_cache_spec` asks for k blocks more, each with both states.
        """
        columns = self.state.conv_kernel - 1 + draft_tokens
        block = self.state.state_bytes(ranks) + columns * self.state.conv_column_bytes(ranks)
        return self.count * (draft_tokens + 1) * block


@dataclass(frozen=True)
class StateStrategy:
    """How many states and token inputs a step reads and writes, per request and layer.

    Attributes:
        states_read, states_written: states, the same for every number of drafts.
        states_a_draft: further states written for each draft.
        replays: True if tokens' inputs are kept and read again.
    """

    name: str
    label: str
    states_read: int
    states_written: int = 1
    states_a_draft: int = 0
    replays: bool = False


STOCK = StateStrategy("stock", "stock vLLM", states_read=1, states_a_draft=1)
ONE_STATE = StateStrategy("one_state", "one state, kept on chip", states_read=1)
REPLAY_FUSED = StateStrategy("replay_fused", "replay in the next step", states_read=1, replays=True)
REPLAY_OWN = StateStrategy("replay_own", "replay, own launch", states_read=2, replays=True)

STATE_STRATEGIES = (STOCK, ONE_STATE, REPLAY_FUSED, REPLAY_OWN)

MOST_DRAFTS = 64
"""Drafts up to which `pays_from` looks."""


@dataclass(frozen=True)
class StateLoad:
    """The requests of one step.

    Attributes:
        acceptance: accepted drafts over drafts, a fraction.
        activation_bits: bits of an activation.
    """

    requests: int
    draft_tokens: int
    acceptance: float
    activation_bits: int
    ranks: int = 1


@dataclass(frozen=True)
class StateBytes:
    """Predicted DRAM bytes of the recurrent states in one step."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


def state_bytes(layers: RecurrentLayers, strategy: StateStrategy, load: StateLoad) -> StateBytes:
    """Bytes that the strategy moves in one step, the convolution's inputs included."""
    state, k = layers.state, load.draft_tokens
    one, column = state.state_bytes(load.ranks), state.conv_column_bytes(load.ranks)
    record = state.record_bytes(load.activation_bits, load.ranks) if strategy.replays else 0.0
    read = strategy.states_read * one + (load.acceptance * k + 1) * record
    written = (strategy.states_written + strategy.states_a_draft * k) * one + (k + 1) * record
    kept = state.conv_kernel - 1
    every = load.requests * layers.count
    return StateBytes(
        read=every * (read + kept * column), written=every * (written + (kept + k) * column)
    )


def saved_of_states(layers: RecurrentLayers, strategy: StateStrategy, load: StateLoad) -> float:
    """Bytes saved against stock; negative if the strategy moves more."""
    stock = state_bytes(layers, STOCK, load).total
    return stock - state_bytes(layers, strategy, load).total


def pays_from(layers: RecurrentLayers, strategy: StateStrategy, load: StateLoad) -> int | None:
    """The fewest drafts a window at which the strategy moves fewer bytes than stock.

    None if there is none. A replay's own launch reads a state more, so that one draft does not pay.
    """
    for drafts in range(1, MOST_DRAFTS + 1):
        each = StateLoad(load.requests, drafts, load.acceptance, load.activation_bits, load.ranks)
        if saved_of_states(layers, strategy, each) > 0:
            return drafts
    return None
