"""A hub model is asked for once, with a short limit: the libraries behind it retry for a minute."""

import os
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs.pair import ResolvedPair

LIMIT_S = 5.0
"""How long the hub may take to answer."""

_CONFIG = "config.json"
_REFUSED = (401, 403, 404)
_ENTRY_MISSING = "EntryNotFound"
"""The hub's word for a model without that file: other files may do, so vLLM decides."""


def check_hub_models(pair: ResolvedPair) -> None:
    """Check target and drafter where they are hub names; raises ConfigError as below."""
    for flag, model in (("--target-model", pair.target), ("--draft-model", pair.draft)):
        if model is not None and not Path(model).is_dir():
            check_hub_model(flag, model)


def check_hub_model(field: str, name: str) -> None:
    """Ask the hub for a model's config.json, or see that it is in the cache.

    A cached model whose hub does not answer is used as it is, offline.

    Raises ConfigError if the hub has no such model, or does not answer and it is not cached.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    from huggingface_hub import constants, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, _CONFIG), str)
    if constants.HF_HUB_OFFLINE:
        if not cached:
            remedy = "HF_HUB_OFFLINE is set and it is not in the cache; unset it, or name a folder"
            raise ConfigError.for_field(field, name, remedy)
        return
    try:
        _ask(f"{constants.ENDPOINT}/{name}/resolve/main/{_CONFIG}")
    except HTTPError as error:
        if error.code in _REFUSED and error.headers.get("X-Error-Code") != _ENTRY_MISSING:
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


def _ask(address: str) -> None:
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(address, headers=headers, method="HEAD"), timeout=LIMIT_S):
        pass


def _no_access(code: int) -> str:
    if code == 404:
        return "the hub has no such model; correct the name, or name a local folder"
    return (
        f"the hub refuses it ({code}): there is no such model, or it needs your consent on its "
        "page and a token (HF_TOKEN)"
    )


def _go_offline(constants: Any) -> None:
    """Have the libraries take the cache at once, in this process and in vLLM's."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
