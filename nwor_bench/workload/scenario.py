"""Scenarios in TOML: the model's prompts and its decoding settings.

Every rule on a scenario's values is defined once, on the fields of `ScenarioValues`, so it applies
to a file's value and a flag's value alike.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from nwor_bench.errors import ConfigError
from nwor_bench.workload.options import declared
from nwor_bench.workload.resources import resource_dir
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.toml_file import NamedFile, StrictModel, read_toml

_CHECKS = {each.field: each.option.check for each in declared(ScenarioValues)}


class PromptSource(StrictModel):
    """Where a scenario's prompts come from, and how long they may be (in characters).

    With `tokens` each prompt is cut or repeated to exactly that many tokens. `category_field` names
    a hub data set's column of categories, which take turns in a batch; without it all are one.
    """

    source: Literal["builtin", "hub", "jsonl"] = "builtin"
    categories: tuple[str, ...] = ()
    min_chars: int = Field(default=1, ge=1)
    max_chars: int | None = Field(default=None, ge=1)
    path: Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    field: str | None = None
    category_field: str | None = None
    where: dict[str, str] = Field(default_factory=dict)
    instruction: str | None = None
    limit: int = Field(default=200, ge=1)
    tokens: int | None = Field(default=None, ge=1, le=10_000_000)

    @model_validator(mode="after")
    def _fits_its_source(self) -> "PromptSource":
        if self.source == "jsonl" and self.path is None:
            raise ValueError("source 'jsonl' needs `path`, a file with one JSON object a line")
        if self.source == "hub" and (self.dataset is None or self.field is None):
            raise ValueError("source 'hub' needs `dataset` and `field` (the column of the text)")
        if self.source != "jsonl" and self.path is not None:
            raise ValueError('`path` needs `source = "jsonl"`')
        if self.source != "hub" and self.dataset is not None:
            raise ValueError('`dataset` needs `source = "hub"`')
        if self.source != "hub" and self.category_field is not None:
            raise ValueError('`category_field` needs `source = "hub"`')
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"write min_chars ({self.min_chars}) <= max_chars ({self.max_chars})")
        return self


class Scenario(ScenarioValues, NamedFile):
    """A workload: prompts, how many of them at once, and how the model decodes."""

    prompts: PromptSource = PromptSource()

    @field_validator("*")
    @classmethod
    def _passes_its_check(cls, value: Any, field: ValidationInfo) -> Any:
        check = _CHECKS.get(str(field.field_name))
        wanted = None if check is None else check(value)
        if wanted is not None:
            raise ValueError(wanted)
        return value


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
