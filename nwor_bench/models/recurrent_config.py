"""A model's recurrent layers from its config.json: gated delta net, KDA, Mamba2."""

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_reader import MODEL_BITS, Config, ConfigReader
from nwor_bench.models.layer_kinds import FULL_EVERY, Kind, every_nth, listed_kinds, recurrent_word
from nwor_bench.models.recurrent import RecurrentLayers, RecurrentState


def recurrent_layers(config: Config) -> tuple[RecurrentLayers, int] | None:
    """A hybrid's recurrent layers, and bits of an activation.

    None without such layers, or if the config does not give their states' sizes and types.
    """
    reader = ConfigReader(config)
    try:
        kinds = recurrent_kinds(reader)
        if kinds is None or not {"dtype", "torch_dtype"} & reader.config.keys():
            return None
        count = sum(kind in (Kind.RECURRENT, Kind.BOTH) for kind in kinds)
        return RecurrentLayers(count, read_state(reader)), MODEL_BITS[reader.dtype()]
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
        conv_bits=MODEL_BITS[reader.dtype()],
        record_values=of_keys + of_values,
        record_floats=2 * values,
        parameters=hidden * (into + of_values) + channels * kernel,
    )


def _kimi_delta(reader: ConfigReader) -> RecurrentState:
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
        conv_bits=MODEL_BITS[reader.dtype()],
        record_values=2 * width,
        record_floats=width,
        parameters=hidden * (4 * width + heads) + low_rank + gate + 3 * width * kernel,
    )


def _mamba2(reader: ConfigReader) -> RecurrentState:
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
        conv_bits=MODEL_BITS[reader.dtype()],
        record_values=width + groups * states,
        record_floats=heads,
        parameters=hidden * (width + channels + heads + width) + channels * kernel,
    )
