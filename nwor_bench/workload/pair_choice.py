"""The model pair as the command line names it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from nwor_bench.errors import ConfigError
from nwor_bench.workload.options import Option, Panel


@dataclass(frozen=True)
class PairChoice:
    """The pair as the command line names it; all None is the default pair."""

    # fmt: off
    pair: Annotated[str | None, Option(
        "A model pair's name or .toml file (default: smollm2).", Panel.MODELS,
    )] = None
    """A model pair's name or file."""
    target_model: Annotated[str | None, Option(
        "A local folder or hub name, instead of --pair.", Panel.MODELS,
        aliases=("--model",), flag_variable="TARGET_MODEL",
        engine_argument="model",
    )] = None
    """The target, instead of a pair's."""
    draft_model: Annotated[str | None, Option(
        "The drafter: a local folder or hub name.", Panel.MODELS,
        aliases=("--speculative-model",), flag_variable="DRAFT_MODEL",
    )] = None
    """The drafter, instead of a pair's."""
    method: Annotated[str | None, Option(
        "How to draft: ngram, draft_model, eagle or eagle3.", Panel.MODELS,
    )] = None
    """vLLM's method of drafting."""
    # fmt: on

    def with_config(self, config: Mapping[str, Any] | None) -> "PairChoice":
        """Take the method and the drafter from vLLM's speculative_config where no flag names them.

        Raises ConfigError where a flag says otherwise.
        """
        draft_model = _agreed("--draft-model", self.draft_model, config, "model")
        method = _agreed("--method", self.method, config, "method")
        return replace(self, draft_model=draft_model, method=method)


def _agreed(
    flag: str, given: str | None, config: Mapping[str, Any] | None, name: str
) -> str | None:
    value = (config or {}).get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError.for_field(f"--speculative-config: {name}", value, "write a text")
    if value is not None and given not in (None, value):
        raise ConfigError.for_field(
            flag, given, f"--speculative-config says {name} {value!r}; give one of the two"
        )
    return given if value is None else value
