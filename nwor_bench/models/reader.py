"""What modules that read a part of a config.json ask of its reader."""

from collections.abc import Mapping
from typing import Any, Protocol

from nwor_bench.errors import ConfigError


class Reader(Protocol):
    """Entries of one config.json."""

    config: Mapping[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""

    def whole(self, key: str) -> int:
        """A whole number; 0 if null or absent."""

    def refusal(self, remedy: str) -> ConfigError:
        """The error that names the config."""

    def dtype(self) -> str:
        """The dtype of the activations."""
