"""Model folders and hub names: locate them, read and check their config.json.

The hub is asked once, with a short limit: the libraries behind it retry for a minute.
"""

import json
import logging
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nwor_bench.errors import ConfigError, nearest
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.models.pairs.cache import pair_folder
from nwor_bench.models.pairs.pair import ResolvedPair, load_pair, pair_names
from nwor_bench.records.files import home_path, parse_json, read_text

CONFIG = "config.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

_NEEDED = ("hidden_size", "num_hidden_layers")
"""Sizes that must be given: transformers would silently use another model's defaults."""

_DTYPE = re.compile(r"b?float16|float(32|64|8_\w+)?|half|double")
"""PyTorch's names. Without PyTorch, as in --dry-run, transformers takes any."""

LIMIT_S = 2.0
"""How long the hub may take to answer."""

FETCH_LIMIT_S = 10.0
"""How long it may take to send a config.json."""

_Result = TypeVar("_Result")

_REFUSED = (401, 403, 404)
_ENTRY_MISSING = "EntryNotFound"
"""The hub's word for a model without that file: other files may do, so vLLM decides."""


def locate_model(field: str, reference: str) -> str:
    """The absolute path of a local model folder, or the hub name unchanged.

    `field` names the option in messages. Raises ConfigError for a folder without a usable
    config.json, and for a reference that is neither a folder nor a possible hub name.
    """
    path = home_path(reference)
    if reference.strip() and path.is_dir():
        folder = str(path.resolve())
        read_model_config(folder, field)
        return folder
    if path.is_file():
        raise ConfigError.for_field(
            field, reference, "it is a file; name the folder that holds config.json"
        )
    if not _HUB_NAME.fullmatch(reference):
        raise ConfigError.for_field(
            field, reference, "no such folder; name a local model folder or a hub model (org/name)"
        )
    return reference


def read_model_config(target: str, field: str = "model") -> dict[str, Any] | None:
    """config.json of a local model folder as a dict; None for a hub name.

    Raises ConfigError if config.json is missing, or it or its text_config is not a JSON object.
    """
    folder = home_path(target)
    if not folder.is_dir():
        return None
    missing = "the folder holds no config.json; name a folder saved by transformers"
    return read_config_file(folder / CONFIG, field, target, missing)


def read_config_file(
    path: Path,
    field: str,
    named: str,
    missing: str = "there is no such file; name a model's config.json",
) -> dict[str, Any]:
    """A config.json as a dict; `field` and `named` are the option and its value in messages.

    Raises ConfigError if it cannot be read, or it or its text_config is not a JSON object.
    """
    try:
        config = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise ConfigError.for_field(field, named, missing) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = f"its config cannot be read as JSON ({reason}); name another config.json"
        raise ConfigError.for_field(field, named, remedy) from error
    if not isinstance(config, dict):
        remedy = "its config is not a JSON object; name a model's config.json"
        raise ConfigError.for_field(field, named, remedy)
    if not isinstance(config.get("text_config") or {}, dict):
        remedy = 'the "text_config" of its config is not an object; correct it'
        raise ConfigError.for_field(field, named, remedy)
    return config


@dataclass(frozen=True)
class FoundConfig:
    """A config.json's content, the model's name, and the place of the file."""

    name: str
    config: dict[str, Any]
    origin: str


def is_pair(named: str) -> bool:
    """True for a pair's .toml file, and for a pair's name unless a file or folder here has it."""
    return named.endswith(".toml") or (named in pair_names() and not home_path(named).exists())


def find_config(field: str, named: str) -> FoundConfig:
    """The config of a config.json, a model folder, a pair, or a hub model, cached or not.

    Of a hub model only config.json is fetched. Raises ConfigError.
    """
    path = home_path(named)
    if is_pair(named):
        return _of_pair(field, named)
    if not path.exists() and not _HUB_NAME.fullmatch(named) and nearest(named, pair_names())[1]:
        raise ConfigError.unknown(field, named, pair_names())
    if path.is_file():
        name = path.resolve().parent.name if path.name == CONFIG else path.stem
        return FoundConfig(name, read_config_file(path, field, named), str(path))
    located = locate_model(field, named)
    config = read_model_config(located, field)
    if config is not None:
        return FoundConfig(Path(located).name, config, located)
    from huggingface_hub import constants, try_to_load_from_cache

    file = try_to_load_from_cache(named, CONFIG, cache_dir=constants.HF_HUB_CACHE)
    if not isinstance(file, str):
        check_hub_model(field, named)
        file = _fetch_config(field, named)
    return FoundConfig(named, read_config_file(Path(file), field, named), file)


def _of_pair(field: str, named: str) -> FoundConfig:
    """The config of a pair's target."""
    pair = load_pair(named)
    if pair.shape is not None:
        return FoundConfig(pair.name, pair.shape.target, f"pair {named}")
    folder = pair_folder(pair)
    folder = folder if pair.packaged else folder / "target"
    missing = f"it is not here yet; write nwor-bench list --fetch {named}"
    return FoundConfig(
        pair.name, read_config_file(folder / CONFIG, field, named, missing), str(folder)
    )


def _fetch_config(field: str, name: str) -> str:
    """Path of a hub model's config.json in the cache, fetched silently."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)

    def fetch() -> str:
        return hf_hub_download(name, CONFIG, cache_dir=constants.HF_HUB_CACHE)

    try:
        return _within(FETCH_LIMIT_S, fetch)
    except OSError as error:  # the hub's own errors too
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        remedy = f"its {CONFIG} cannot be fetched ({reason}); name a {CONFIG} or a model folder"
        raise ConfigError.for_field(field, name, remedy) from error


def check_model_configs(pair: ResolvedPair) -> None:
    """Read target's and drafter's config.json as transformers does; hub models are skipped.

    Raises ConfigError with the pair, the file and transformers' reason.
    """
    for role, model in (("target", pair.target), ("drafter", pair.draft)):
        if model is not None and Path(model).is_dir():
            _check(f"pair {pair.name}: {role}", Path(model))


def _check(field: str, folder: Path) -> None:
    config = read_model_config(str(folder), field) or {}
    inner = config.get("text_config") or {}
    path = str(folder / CONFIG)
    if (folder / CONFIG).read_bytes().startswith(BOM_UTF8):
        remedy = "it begins with a byte order mark, at which transformers fails; save it without"
        raise ConfigError.for_field(field, path, remedy)
    if config.get("model_type") in KNOWN_TYPES:
        for key in _NEEDED:
            if config.get(key) is None and inner.get(key) is None:
                raise ConfigError.for_field(
                    field, path, f'it has no "{key}"; add it with the model\'s value'
                )
    for entries in (config, inner):
        dtype = entries.get("dtype") or entries.get("torch_dtype")
        if isinstance(dtype, str) and not _DTYPE.fullmatch(dtype):
            remedy = f'its "dtype" is {dtype!r}; write bfloat16, float16 or float32'
            raise ConfigError.for_field(field, path, remedy)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return  # vLLM knows types that transformers does not; vLLM checks these later
    try:
        AutoConfig.from_pretrained(str(folder))
    except Exception as error:  # its validators raise many types of errors
        raise refused_config(field, folder, error, "transformers") from error


def refused_config(field: str, folder: Path, error: Exception, who: str) -> ConfigError:
    """Error for a config.json that `who` refuses, with the reason in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError.for_field(
        field,
        str(folder / "config.json"),
        f"{who} refuses it ({reason}); correct that entry, or name another model",
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_hub_models(pair: ResolvedPair) -> None:
    """Check target and drafter if they are hub names; raises ConfigError as below."""
    for flag, model in (("--model", pair.target), ("--draft-model", pair.draft)):
        if model is not None and not Path(model).is_dir():
            check_hub_model(flag, model)


def check_hub_model(field: str, name: str) -> None:
    """Ask the hub for a model's config.json, or see that it is in the cache.

    If the hub does not answer, a cached model is used offline.

    Raises ConfigError if the hub has no such model, or does not answer and it is not cached.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    from huggingface_hub import constants, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, CONFIG), str)
    if constants.HF_HUB_OFFLINE:
        if not cached:
            remedy = "HF_HUB_OFFLINE is set and it is not in the cache; unset it, or name a folder"
            raise ConfigError.for_field(field, name, remedy)
        return
    try:
        _within(LIMIT_S, lambda: _ask(f"{constants.ENDPOINT}/{name}/resolve/main/{CONFIG}"))
    except HTTPError as error:
        if error.code in _REFUSED or (error.code >= 500 and not cached):
            raise ConfigError.for_field(field, name, _no_access(error.code)) from error
    except (URLError, OSError) as error:
        if not cached:
            reason = getattr(error, "reason", None) or error
            raise ConfigError.for_field(
                field,
                name,
                f"there is no such folder, and {constants.ENDPOINT} cannot be reached ({reason}); "
                "name a local folder, or go online",
            ) from error
        _go_offline(constants)


@cache
def _ask(address: str) -> None:
    """Raises HTTPError or OSError; what was found once in this process is not asked again."""
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        urlopen(Request(address, headers=headers, method="HEAD"), timeout=LIMIT_S).close()
    except HTTPError as error:
        if error.headers.get("X-Error-Code") != _ENTRY_MISSING:
            raise


def _within(limit_s: float, call: Callable[[], _Result]) -> _Result:
    """Result of a call; raises TimeoutError in time, even if the look-up of a name hangs."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # for the caller
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


def _no_access(code: int) -> str:
    if code == 404:
        return "the hub has no such model; correct the name, or name a local folder"
    if code >= 500:
        return f"the hub fails ({code}); try again later, or name a local folder"
    return (
        f"the hub refuses it ({code}): there is no such model, or it needs your consent on its "
        "page and a token (HF_TOKEN)"
    )


def _go_offline(constants: Any) -> None:
    """Have the libraries take the cache at once, in this process and in vLLM's."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
