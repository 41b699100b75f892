"""Ways to keep a recurrent layer's state right when drafts are rejected, as DRAM bytes of a step.

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

from nwor_bench.models.recurrent.state import RecurrentLayers


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
