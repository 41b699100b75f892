"""Scenario files: prompts, how many of them at once, and how the model decodes."""

from pathlib import Path

from pydantic import Field, model_validator

from nwor_bench.errors import ConfigError
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.toml_file import NamedFile, StrictModel, read_toml, resource_dir


class PromptSource(StrictModel):
    """Which prompts a scenario uses: those of `path` (JSONL), or the shipped ones without it."""

    path: Path | None = None
    categories: tuple[str, ...] = ()
    """Empty for all."""
    min_chars: int = Field(default=1, ge=1)
    max_chars: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """Cut or repeat each prompt to exactly this many tokens."""

    @model_validator(mode="after")
    def _has_lengths(self) -> "PromptSource":
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"write min_chars ({self.min_chars}) <= max_chars ({self.max_chars})")
        return self


class Scenario(ScenarioValues, NamedFile):
    """A workload: prompts, how many of them at once, and how the model decodes."""

    prompts: PromptSource = PromptSource()


def scenario_names() -> tuple[str, ...]:
    """Names of the scenarios that ship with nwor-bench."""
    return tuple(sorted(path.stem for path in resource_dir("scenarios").glob("*.toml")))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A shipped scenario by name, or a user's own by the path of its .toml file.

    Raises ConfigError for an unknown name or a faulty file. A relative path to a JSONL file
    is taken from the folder of the TOML file.
    """
    if str(name_or_path).endswith(".toml"):
        path = Path(name_or_path)
    elif str(name_or_path) in scenario_names():
        path = resource_dir("scenarios") / f"{name_or_path}.toml"
    else:
        raise ConfigError.unknown("--scenario", str(name_or_path), scenario_names())
    scenario = read_toml(path, Scenario)
    prompts = scenario.prompts
    if prompts.path is not None:
        prompts = prompts.model_copy(update={"path": path.parent / prompts.path})
    return scenario.model_copy(update={"name": scenario.name or path.stem, "prompts": prompts})
