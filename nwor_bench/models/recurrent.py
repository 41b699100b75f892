"""Recurrent layers' states, and the DRAM bytes that stock vLLM moves to keep them right.

vLLM keeps two states a layer: the recurrent one, [heads, rows, columns], and the last inputs of a
short convolution, [channels, kernel - 1 + drafts]. Its fused kernels read the state S at the last
accepted token and store one at every position: with k drafts and a certain token a request they
read S and write (k + 1) S. The convolution reads kernel - 1 columns and writes kernel - 1 + k.

A staged window writes one state. Its verification reads S and keeps a record of each token; the
commit reads S and the records of what was accepted, and writes S: with a accepted drafts of a
request 2 S + (1 + a) R read and S + (k + 1) R written. The convolution stays as it is. vLLM's
RecoverSSM (KDA) moves the same; docs/states.md has its ReplaySSM (Mamba2).
"""

from dataclasses import dataclass

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_reader import (
    FULL_EVERY,
    MODEL_BITS,
    Config,
    ConfigReader,
    Kind,
    every_nth,
    listed_kinds,
    recurrent_word,
)
from nwor_kernels.limits import RECORD_ROWS

STAGED_KINDS = ("gated delta net",)
"""States that mode stage writes once a window; those of other kinds stay as stock writes them."""


@dataclass(frozen=True)
class Moved:
    """Predicted DRAM bytes of one step."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class RecurrentState:
    """The state of one layer and request; sizes of elements in bits.

    Attributes:
        heads, rows, columns: the recurrent state.
        conv_channels, conv_kernel: the convolution before it.
        parameters: matrix elements of the layer, for its weights.
        record_bits: what a staged window keeps of one token; ranks share it, as they do the heads.
    """

    kind: str
    heads: int
    rows: int
    columns: int
    conv_channels: int
    conv_kernel: int
    state_bits: int
    conv_bits: int
    parameters: int
    record_bits: int

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


@dataclass(frozen=True)
class RecurrentLayers:
    """A model's recurrent layers: all of them have one state's shape."""

    count: int
    state: RecurrentState

    def state_bytes(self, ranks: int = 1) -> float:
        """Bytes of one request's recurrent state in all layers."""
        return self.count * self.state.state_bytes(ranks)

    def page_bytes(self, draft_tokens: int, ranks: int = 1) -> float:
        """Bytes of one layer's slot, without padding: a state and the convolution's inputs."""
        columns = self.state.conv_kernel - 1 + draft_tokens
        return self.state.state_bytes(ranks) + columns * self.state.conv_column_bytes(ranks)

    def slot_bytes(self, draft_tokens: int, ranks: int = 1, slots: int | None = None) -> float:
        """Bytes that vLLM reserves a request, without padding.

        `MambaBase.get_kv_cache_spec` asks for k blocks more, each with both states.

        Args:
            slots: in each layer; None: one for each of k + 1 tokens.
        """
        slots = draft_tokens + 1 if slots is None else slots
        return self.count * slots * self.page_bytes(draft_tokens, ranks)

    def record_bytes(self, ranks: int = 1) -> float:
        """Bytes of one token's records in all layers."""
        return self.count * self.state.record_bits / 8 / ranks

    def ring_bytes(self, draft_tokens: int, ranks: int = 1) -> float:
        """Bytes of a request's ring of records; 0 if it can have none."""
        fits = self.state.kind in STAGED_KINDS and draft_tokens + 1 <= RECORD_ROWS
        return RECORD_ROWS * self.record_bytes(ranks) if fits else 0

    def moved(self, requests: int, draft_tokens: int, ranks: int = 1) -> Moved:
        """Bytes that stock vLLM moves in one step, the convolution's inputs included."""
        one, column = self.state.state_bytes(ranks), self.state.conv_column_bytes(ranks)
        kept, every = self.state.conv_kernel - 1, requests * self.count
        return Moved(
            read=every * (one + kept * column),
            written=every * ((draft_tokens + 1) * one + (kept + draft_tokens) * column),
        )

    def staged(self, requests: int, draft_tokens: int, accepted: float, ranks: int = 1) -> Moved:
        """Bytes that a staged step moves, its commit included; `accepted`: of all requests."""
        stock = self.moved(requests, draft_tokens, ranks)
        state, record = self.state_bytes(ranks), self.record_bytes(ranks)
        more = added_by_staging(state, record, requests, requests * draft_tokens, accepted)
        return Moved(stock.read + more.read, stock.written + more.written)

    def with_rings(
        self, requests: int, draft_tokens: int, accepted: float, ranks: int = 1
    ) -> Moved:
        """Bytes that a staged step with rings moves on average (docs/states.md: four schemes): a
        commit leaves `kept` rows, and writes the state and empties the ring if B - k or more are
        there, half of `kept` - 1 more on average."""
        stock, kept = self.moved(requests, draft_tokens, ranks), 1 + accepted / requests
        state, record = self.state_bytes(ranks), self.record_bytes(ranks)
        full = RECORD_ROWS - draft_tokens + (kept - 1) / 2
        share, live = min(kept / full, 1.0), max(full - kept, 0.0) / 2
        read = live * record + share * (state + full * record)
        written = (draft_tokens + 1) * (record - state) + share * state
        return Moved(stock.read + requests * read, stock.written + requests * written)


def added_by_staging(
    state: float, record: float, requests: float, drafts: float, accepted: float
) -> Moved:
    """Bytes that a staged step moves more than stock's; the module's text has the formula.

    The state is read again for its one write; every token leaves a record, of which those that
    are kept are read.

    Args:
        state, record: bytes of a request's state and of a token's record.
        drafts, accepted: of all requests.
    """
    return Moved(
        read=requests * state + (requests + accepted) * record,
        written=(requests + drafts) * record - drafts * state,
    )


def recurrent_layers(config: Config) -> RecurrentLayers | None:
    """A hybrid's recurrent layers.

    None without such layers, or if the config does not give their states' sizes and types.
    """
    reader = ConfigReader(config)
    try:
        kinds = recurrent_kinds(reader)
        if kinds is None or not {"dtype", "torch_dtype"} & reader.config.keys():
            return None
        count = sum(kind in (Kind.RECURRENT, Kind.BOTH) for kind in kinds)
        return RecurrentLayers(count, read_state(reader))
    except ConfigError:
        return None


def recurrent_kinds(reader: ConfigReader) -> tuple[Kind, ...] | None:
    """The kind of every layer; None for a model without recurrent layers."""
    try:
        kinds = listed_kinds(reader.config)
    except ValueError as word:
        raise reader.refusal(f"its layers are of kind {word}, which is not covered") from None
    if kinds is None and reader.config.get("linear_num_key_heads"):
        interval = reader.number("full_attention_interval", FULL_EVERY)
        kinds = every_nth(reader.number("num_hidden_layers"), interval)
    if kinds is None or not {Kind.RECURRENT, Kind.BOTH} & set(kinds):
        return None
    return kinds


def read_state(reader: ConfigReader) -> RecurrentState:
    """The state of each recurrent layer. Raises ConfigError for kinds that are not covered."""
    if reader.config.get("linear_num_key_heads"):
        return _gated_delta_net(reader)
    if reader.config.get("linear_attn_config") or reader.config.get("linear_num_heads"):
        return _kimi_delta(reader)
    if reader.config.get("ssm_state_size") and reader.config.get("mamba_num_heads"):
        return _mamba2(reader)
    raise reader.refusal(
        f"the states of its {recurrent_word(reader.config)} layers are not covered; those of gated "
        "delta net, KDA and Nemotron-H's Mamba2 are"
    )


def _bits(reader: ConfigReader, key: str, default: str) -> int:
    """Bits of a state's element, from the config as vLLM reads it."""
    name = str(reader.config.get(key) or default).removeprefix("torch.")
    if name not in MODEL_BITS:
        raise reader.refusal(f'its "{key}" is {name!r}; write one of {", ".join(MODEL_BITS)}')
    return MODEL_BITS[name]


def _gated_delta_net(reader: ConfigReader) -> RecurrentState:
    """Qwen3-Next and Qwen3.5. Without `mamba_ssm_dtype` vLLM keeps states in the model's dtype."""
    keys, values = reader.number("linear_num_key_heads"), reader.number("linear_num_value_heads")
    key_dim, value_dim = (
        reader.number("linear_key_head_dim"),
        reader.number("linear_value_head_dim"),
    )
    kernel = reader.number("linear_conv_kernel_dim", 4)
    hidden, of_keys, of_values = reader.number("hidden_size"), keys * key_dim, values * value_dim
    channels, bits = 2 * of_keys + of_values, MODEL_BITS[reader.dtype()]
    into = channels + of_values + 2 * values  # the gate z, and b and a of each head
    return RecurrentState(
        kind="gated delta net",
        heads=values,
        rows=value_dim,
        columns=key_dim,
        conv_channels=channels,
        conv_kernel=kernel,
        state_bits=_bits(reader, "mamba_ssm_dtype", reader.dtype()),
        conv_bits=bits,
        parameters=hidden * (into + of_values) + channels * kernel,
        record_bits=32 * (of_values + values) + bits * of_keys,  # u and g, and k
    )


def _kimi_delta(reader: ConfigReader) -> RecurrentState:
    """Kimi Linear, Kimi K3, GLM-5.3-Flash: vLLM keeps KDA's states in float32."""
    config = reader.config.get("linear_attn_config") or {}
    heads = config.get("num_heads") or reader.number("linear_num_heads")
    size = config.get("head_dim") or reader.number("linear_head_dim")
    kernel = config.get("short_conv_kernel_size") or reader.number("linear_conv_kernel_dim", 4)
    hidden, width = reader.number("hidden_size"), heads * size
    bits = MODEL_BITS[reader.dtype()]
    low_rank = hidden * size + size * width  # a decay of each channel, through one head's width
    gate = hidden * width if config.get("use_full_rank_gate") else low_rank
    return RecurrentState(
        kind="KDA",
        heads=heads,
        rows=size,
        columns=size,
        conv_channels=3 * width,
        conv_kernel=kernel,
        state_bits=32,
        conv_bits=bits,
        parameters=hidden * (4 * width + heads) + low_rank + gate + 3 * width * kernel,
        record_bits=(32 + 2 * bits) * width,  # u, and k with its decay
    )


def _mamba2(reader: ConfigReader) -> RecurrentState:
    """Nemotron-H, whose states vLLM keeps in float32 unless the config says otherwise."""
    heads, size = reader.number("mamba_num_heads"), reader.number("mamba_head_dim")
    groups, states = reader.number("n_groups"), reader.number("ssm_state_size")
    kernel = reader.number("conv_kernel", 4)
    hidden, width = reader.number("hidden_size"), heads * size
    channels, bits = width + 2 * groups * states, MODEL_BITS[reader.dtype()]
    return RecurrentState(
        kind="Mamba2",
        heads=heads,
        rows=size,
        columns=states,
        conv_channels=channels,
        conv_kernel=kernel,
        state_bits=_bits(reader, "mamba_ssm_cache_dtype", "float32"),
        conv_bits=bits,
        parameters=hidden * (width + channels + heads + width) + channels * kernel,
        record_bits=bits * (width + groups * states) + 32 * heads,  # x and B, and dt
    )
