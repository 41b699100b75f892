"""Read a model's recurrent layers from its config.json: gated delta net, KDA, Mamba2."""

from nwor_bench.models.layer_kinds import Kind, every_nth, listed_kinds, recurrent_word
from nwor_bench.models.reader import Reader
from nwor_bench.models.recurrent.state import RecurrentState

BITS = {"float32": 32, "bfloat16": 16, "float16": 16}

FULL_EVERY = 4
"""Qwen3-Next's full attention, where its config does not say: every fourth layer."""


def recurrent_kinds(reader: Reader) -> tuple[Kind, ...] | None:
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


def read_state(reader: Reader) -> RecurrentState:
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


def _bits(reader: Reader, key: str, default: str) -> int:
    """The size of a state's element: what the config says, as vLLM reads it."""
    name = str(reader.config.get(key) or default).removeprefix("torch.")
    if name not in BITS:
        raise reader.refusal(f'its "{key}" is {name!r}; write one of {", ".join(BITS)}')
    return BITS[name]


def _gated_delta_net(reader: Reader) -> RecurrentState:
    """Qwen3-Next and Qwen3.5. Without `mamba_ssm_dtype` vLLM keeps states in the model's dtype."""
    keys, values = reader.number("linear_num_key_heads"), reader.number("linear_num_value_heads")
    key_dim, value_dim = (
        reader.number("linear_key_head_dim"),
        reader.number("linear_value_head_dim"),
    )
    kernel = reader.number("linear_conv_kernel_dim", 4)
    hidden, of_keys, of_values = reader.number("hidden_size"), keys * key_dim, values * value_dim
    channels = 2 * of_keys + of_values
    into = channels + of_values + 2 * values  # the gate z, and b and a of each head
    return RecurrentState(
        kind="gated delta net",
        heads=values,
        rows=value_dim,
        columns=key_dim,
        conv_channels=channels,
        conv_kernel=kernel,
        state_bits=_bits(reader, "mamba_ssm_dtype", reader.dtype()),
        conv_bits=BITS[reader.dtype()],
        record_values=of_keys + of_values,
        record_floats=2 * values,
        parameters=hidden * (into + of_values) + channels * kernel,
    )


def _kimi_delta(reader: Reader) -> RecurrentState:
    """Kimi Linear, Kimi K3, GLM-5.3-Flash: vLLM keeps KDA's states in float32."""
    own = reader.config.get("linear_attn_config") or {}
    heads = own.get("num_heads") or reader.number("linear_num_heads")
    size = own.get("head_dim") or reader.number("linear_head_dim")
    kernel = own.get("short_conv_kernel_size") or reader.number("linear_conv_kernel_dim", 4)
    hidden, width = reader.number("hidden_size"), heads * size
    low_rank = hidden * size + size * width  # a decay of each channel, through one head's width
    gate = hidden * width if own.get("use_full_rank_gate") else low_rank
    return RecurrentState(
        kind="KDA",
        heads=heads,
        rows=size,
        columns=size,
        conv_channels=3 * width,
        conv_kernel=kernel,
        state_bits=32,
        conv_bits=BITS[reader.dtype()],
        record_values=2 * width,
        record_floats=width,
        parameters=hidden * (4 * width + heads) + low_rank + gate + 3 * width * kernel,
    )


def _mamba2(reader: Reader) -> RecurrentState:
    """Nemotron-H, whose states vLLM keeps in float32 unless the config says otherwise."""
    heads, size = reader.number("mamba_num_heads"), reader.number("mamba_head_dim")
    groups, states = reader.number("n_groups"), reader.number("ssm_state_size")
    kernel = reader.number("conv_kernel", 4)
    hidden, width = reader.number("hidden_size"), heads * size
    channels = width + 2 * groups * states
    return RecurrentState(
        kind="Mamba2",
        heads=heads,
        rows=size,
        columns=states,
        conv_channels=channels,
        conv_kernel=kernel,
        state_bits=_bits(reader, "mamba_ssm_cache_dtype", "float32"),
        conv_bits=BITS[reader.dtype()],
        record_values=width + groups * states,
        record_floats=heads,
        parameters=hidden * (width + channels + heads + width) + channels * kernel,
    )
