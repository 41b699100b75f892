"""Flags of `nwor-bench plan`: check them by name, and make a prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nwor_bench.cli.command import PRINTED
from nwor_bench.errors import ConfigError
from nwor_bench.models.byte_model import CACHE_BITS, WEIGHT_BITS, ByteModel, Workload
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.config_reader import AUTO, MODEL_BITS, chosen_cache_dtype
from nwor_bench.workload.options import fraction

if TYPE_CHECKING:
    from nwor_bench.report.plan import BytePrediction


MOST = 10**9
"""Most requests, tokens or ranks; more is a typing error."""


@dataclass(frozen=True)
class NamedConfig:
    """A config.json's content, the model's name, and the flag and value that named it."""

    name: str
    config: Mapping[str, Any]
    flag: str
    value: str


def parse_acceptance(text: str) -> float:
    """Accepted over drafts, as `0.5` or `50%`. Raises ConfigError unless it is from 0 to 1."""
    value = fraction(text)
    if value is None or not 0 <= value <= 1:
        raise ConfigError.for_field(
            "--acceptance", text, "write a fraction of drafts from 0 to 1 such as 0.5 or 50%"
        )
    return value


def check_workload(load: Workload) -> None:
    """Raise ConfigError for a number out of range."""
    counts = {
        "--requests": load.requests,
        "--context": load.context,
        "--draft-tokens": load.draft_tokens,
        "--tensor-parallel-size": load.ranks,
    }
    for flag, value in counts.items():
        if not 1 <= value <= MOST:
            raise ConfigError.for_field(flag, value, f"write 1 to {MOST}")


def load_configs(
    configs: Sequence[Path], target_model: str | None, pair: str | None
) -> list[NamedConfig]:
    """The config.json of each named model; exactly one of the three arguments must be given.

    Raises ConfigError for unreadable files, hub names, and pairs whose weights were not fetched.
    """
    named = {"--config": configs, "--target-model": target_model, "--pair": pair}
    given = [flag for flag, value in named.items() if value]
    if not given:
        raise ConfigError.at(
            "no model", "write --config FILE (a config.json), --target-model FOLDER or --pair NAME"
        )
    if len(given) > 1:
        raise ConfigError.for_field(given[1], named[given[1]], f"{given[0]} names the model; "
                                    "give one of the two")  # fmt: skip
    if target_model:
        return [_of_folder(target_model, "--target-model", target_model)]
    if pair:
        return [_of_pair(pair)]
    return [_of_path(path) for path in configs]


def predict(
    source: NamedConfig, load: Workload, cache_dtype: str, weight_dtype: str
) -> "BytePrediction":
    """The prediction for one model.

    Raises ConfigError for an unknown dtype, or if the model cannot be split over the ranks.
    """
    shape = read_shape(source.config, source.flag, source.value)
    if not shape.fits_ranks(load.ranks):
        raise ConfigError.for_field(
            "--tensor-parallel-size",
            load.ranks,
            f"write a divisor of the {shape.heads} attention heads that divides the "
            f"{shape.kv_heads} KV heads or is a multiple of them",
        )
    cache = chosen_cache_dtype(source.config, cache_dtype)
    cache = shape.dtype if cache == AUTO else cache
    if cache not in CACHE_BITS:
        raise ConfigError.unknown("--cache-dtype", cache, [*CACHE_BITS, AUTO])
    if weight_dtype not in (AUTO, *WEIGHT_BITS):
        raise ConfigError.unknown("--weight-dtype", weight_dtype, [*WEIGHT_BITS, AUTO])
    weight_bits = shape.weight_bits if weight_dtype == AUTO else WEIGHT_BITS[weight_dtype]
    if weight_bits is None:
        raise ConfigError.for_field(
            "--weight-dtype", weight_dtype, "the config's quantization_config does not say how "
            f"many bits a weight has; write one of {', '.join(WEIGHT_BITS)}",
        )  # fmt: skip
    if weight_dtype == AUTO:
        plain = weight_bits == MODEL_BITS[shape.dtype]
        weight_dtype = shape.dtype if plain else f"{weight_bits}-bit (quantised)"
    model = ByteModel(shape, CACHE_BITS[cache], weight_bits, MODEL_BITS[shape.dtype])
    from nwor_bench.report.plan import BytePrediction

    return BytePrediction(source.name, model, load, cache, weight_dtype)


def write_output(flag: str, path: Path, text: str) -> None:
    """Write a file, replacing an older one. Raises ConfigError if it cannot be written."""
    if path == PRINTED:
        raise ConfigError.for_field(flag, str(path), "only a file can be written; name one")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError.for_field(
            flag, str(path), f"it cannot be written ({error.strerror}); name a file in a folder "
            "that exists and can be written",
        ) from error  # fmt: skip


def _of_path(path: Path) -> NamedConfig:
    if path.is_dir():
        return _of_folder(str(path), "--config", str(path))
    from nwor_bench.models.pairs.local import read_config_file

    config = read_config_file(path, "--config", str(path))
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return NamedConfig(name, config, "--config", str(path))


def _of_folder(folder: str, flag: str, value: str, name: str | None = None) -> NamedConfig:
    from nwor_bench.models.pairs.local import locate_model, read_model_config

    located = locate_model(flag, folder)
    config = read_model_config(located, flag)
    if config is None:
        raise ConfigError.for_field(
            flag, value, "a hub model is not read from here; name its config.json with --config"
        )
    return NamedConfig(name or Path(located).name, config, flag, value)


def _of_pair(name: str) -> NamedConfig:
    from nwor_bench.models.pairs import load_pair, pair_folder

    pair = load_pair(name)
    if pair.folder is not None:
        return _of_folder(pair.folder.target, "--pair", name, name)
    if pair.shape is not None:  # its file holds the config: there is nothing to fetch
        return NamedConfig(pair.name, pair.shape.target, "--pair", name)
    folder = pair_folder(pair)
    if not folder.is_dir():
        raise ConfigError.for_field(
            "--pair", name, f"it is not on this machine yet; run `nwor-bench pairs fetch {name}`"
        )
    target = folder if pair.packaged is not None else folder / "target"
    return _of_folder(str(target), "--pair", name, pair.name)
