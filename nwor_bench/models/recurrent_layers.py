"""A hybrid's recurrent layers alone, for models of which the byte model does not cover the rest."""

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_json import MODEL_BITS, Config, ConfigReader
from nwor_bench.models.layer_kinds import Kind
from nwor_bench.models.recurrent.read import read_state, recurrent_kinds
from nwor_bench.models.recurrent.state import RecurrentLayers


def recurrent_layers(config: Config) -> tuple[RecurrentLayers, int] | None:
    """A hybrid's recurrent layers, and bits of an activation.

    None without such layers, and where the config does not tell their states' sizes and types.
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
