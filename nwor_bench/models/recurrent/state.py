"""A recurrent layer's state, and the inputs from which a token's step can be run again. Pure.

vLLM keeps two states a layer: the recurrent one, [heads, rows, columns], and the last inputs of a
short convolution, [channels, kernel - 1 + drafts].
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
