"""Scenario files, and `resolve`: a scenario merged with flags or a sweep file."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from nwor_bench.errors import ConfigError
from nwor_bench.records.state_slots import ADDITIONAL, FIELD, one_slot
from nwor_bench.records.types import StageBy
from nwor_bench.workload.experiment import refusals, with_modes
from nwor_bench.workload.method_arms import NUMBER, SPECULATION
from nwor_bench.workload.options import declared, flag_of, names, read_all, remedy
from nwor_bench.workload.run_spec import (
    MAX_DRAFT_TOKENS,
    WARMUP_LOOKBACK,
    PairChoice,
    RunSpec,
    VllmEntries,
)
from nwor_bench.workload.scenario_values import MAX_DRAWN_BLOCKS, ScenarioValues
from nwor_bench.workload.toml_file import NamedFile, StrictModel, read_toml, resource_dir

__all__ = [
    "PromptSource",
    "RunSpec",
    "Scenario",
    "flag_of",
    "load_scenario",
    "resolve",
    "scenario_names",
]


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
        names, shown_by = scenario_names(), "nwor-bench list scenarios"
        raise ConfigError.unknown("--scenario", str(name_or_path), names, shown_by)
    scenario = read_toml(path, Scenario)
    prompts = scenario.prompts
    if prompts.path is not None:
        prompts = prompts.model_copy(update={"path": path.parent / prompts.path})
    return scenario.model_copy(update={"name": scenario.name or path.stem, "prompts": prompts})


_NOT_FOR_ENGINE_ARGS = {
    "tokenizer": "it comes with --model",
    "hf_overrides": "memory and bytes are worked out from config.json; change it in a copy of the "
    "model's folder, or write a pair file",
    "worker_extension_cls": "nwor-bench sets it itself",
    "disable_log_stats": "nwor-bench reads vLLM's counters",
} | {
    entry.option.engine_argument: f"use {entry.flag}"
    for holder in (PairChoice, ScenarioValues, RunSpec)
    for entry in declared(holder)
    if entry.option.engine_argument is not None
}
"""Engine arguments that have a flag of their own, or that nwor-bench must set; what to do."""


def resolve(scenario: Scenario, **given: Any) -> RunSpec:
    """Merge a scenario with the values of flags or of a sweep file and check the whole.

    Args:
        scenario: the workload as its file has it.
        given: values by the name of their flag, as flags or sweep files write them; None gives
            nothing. Names are those of `ScenarioValues`, `RunSpec` and `VllmEntries`.

    Raises:
        ConfigError: naming the flag, the value, and what to write.
    """
    _require_known(given)
    values = read_all(RunSpec, given)
    _add_entries(values, given)
    of_scenario = names(declared(ScenarioValues))
    wanted = {name: given[name] for name in of_scenario if given.get(name) is not None}
    wanted = _drafts_from(values.get("speculative_config"), wanted)
    if values.get("draft_counts"):
        wanted.setdefault("draft_tokens", max(values["draft_counts"]))
    spec = with_modes(RunSpec(scenario=_override(scenario, wanted), **values), given)
    for refusal in chain(_refusals(spec), _acceptance_refused(given, spec.scenario.draft_tokens)):
        raise refusal
    return spec


def _acceptance_refused(given: Mapping[str, Any], drafts: int) -> Iterator[ConfigError]:
    """Synthetic acceptance that no window of so many drafts has."""
    length, rates = given.get("acceptance_length"), given.get("acceptance_rates")
    if length is not None and not 1 <= float(length) <= drafts + 1:
        remedy_text = f"write 1 to {drafts + 1}: what a window of {drafts} drafts can give"
        yield ConfigError.for_field("--acceptance-length", length, remedy_text)
    if rates is not None and (
        len(rates) != drafts or not all(1 >= a >= b >= 0 for a, b in pairwise([1, *rates]))
    ):
        remedy_text = f"write {drafts} numbers from 1 to 0, none above the one before it"
        yield ConfigError.for_field("--acceptance-rates", rates, remedy_text)


def _require_known(given: Iterable[str]) -> None:
    holders = (ScenarioValues, RunSpec, VllmEntries)
    unknown = set(given).difference(*(names(declared(holder)) for holder in holders))
    if unknown:
        raise TypeError(f"no option is called {min(unknown)!r}")


def _add_entries(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Move values of `VllmEntries` into the JSON that vLLM reads."""
    for entry in declared(VllmEntries):
        value = given.get(entry.name)
        if value is not None and entry.option.entry is not None:
            field, key = entry.option.entry
            wanted = entry.read(value)
            said = values.get(field) or {}
            if key in said and said[key] != wanted:
                remedy_text = f"{flag_of(field)} says {key} {said[key]!r}; give one of the two"
                raise ConfigError.for_field(entry.flag, value, remedy_text)
            values[field] = {**said, key: wanted}


def _override(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    try:
        return Scenario.model_validate({**dict(scenario), **values})
    except ValidationError as error:
        faults = [
            ConfigError.for_field(flag_of(str(fault["loc"][0])), fault["input"], remedy(fault))
            for fault in error.errors()
        ]
        raise ConfigError.all_of(faults) from error


def _drafts_from(config: Mapping[str, Any] | None, values: dict[str, Any]) -> dict[str, Any]:
    """Let vLLM's num_speculative_tokens set the draft tokens, unless the flag contradicts it."""
    if config is None or "num_speculative_tokens" not in config:
        return values
    drafts, flag_value = config["num_speculative_tokens"], values.get("draft_tokens")
    if flag_value not in (None, drafts):
        raise ConfigError.for_field(
            "--draft-tokens",
            flag_value,
            f"--speculative-config says num_speculative_tokens {drafts!r}; give one of the two",
        )
    return {**values, "draft_tokens": drafts}


def _refusals(spec: RunSpec) -> Iterator[ConfigError]:
    """Rules that concern more than one option."""
    scenario = spec.scenario
    nested = (spec.against or {}).get(SPECULATION)
    drafts = nested.get(NUMBER, 0) if isinstance(nested, dict) else 0
    for field, number in (
        ("--draft-tokens", scenario.draft_tokens),
        (f"--against: {NUMBER}", drafts),
    ):
        if type(number) is not int or not 0 <= number <= MAX_DRAFT_TOKENS:
            remedy_text = f"write 1 to {MAX_DRAFT_TOKENS}: vLLM verifies no more (MAX_SPEC_LEN)"
            yield ConfigError.for_field(field, number, remedy_text)
    room = scenario.max_new_tokens + scenario.draft_tokens
    if room >= scenario.max_model_len:
        yield ConfigError.for_field(
            "--max-model-len",
            scenario.max_model_len,
            f"write more than {room} (--max-new-tokens {scenario.max_new_tokens} + "
            f"--draft-tokens {scenario.draft_tokens}) so that a prompt has room too",
        )
    yield from _amount_refused(spec)
    yield from _arguments_refused(spec.against or {}, "--against")
    yield from refusals(spec)
    yield from _arguments_refused(spec.engine_args, "--engine-args")
    if one_slot(spec.engine_args.get(ADDITIONAL)):
        remedy_text = "off x off needs a slot for each draft; write it into --against"
        value = spec.engine_args[ADDITIONAL]
        yield ConfigError.for_field(f"--engine-args: {FIELD}", value, remedy_text)
    if spec.stage_by is not StageBy.REFERENCE and not spec.stages:
        remedy_text = "no cell stages; write --nwor-modes off,stage or leave it out"
        yield ConfigError.for_field("stage_by", spec.stage_by.value, remedy_text)


def _amount_refused(spec: RunSpec) -> Iterator[ConfigError]:
    """How much to measure: the flags must not contradict each other."""
    batches, warmup = spec.scenario.batches, spec.scenario.warmup
    if spec.checks_only:
        for name in ("ci_width", "time_budget_s", "max_blocks", "max_warmup", "counters"):
            if getattr(spec, name) is not None:
                flag = flag_of(name.removesuffix("_s"))
                remedy_text = f"{flag} is for timed blocks; write --batches 1 or more"
                yield ConfigError.for_field("--batches", batches, remedy_text)
    most, most_warmup = spec.max_blocks, spec.max_warmup
    if most is not None:
        if spec.ci_width is None and spec.time_budget_s is None:
            remedy_text = (
                "it bounds --ci-width and --time-budget; write one of them too, or only --batches"
            )
            yield ConfigError.for_field("--max-blocks", most, remedy_text)
        if not batches <= most <= MAX_DRAWN_BLOCKS:
            wanted = f"{batches} (--batches) or more"
            wanted = wanted if most < batches else f"{MAX_DRAWN_BLOCKS} or less"
            yield ConfigError.for_field("--max-blocks", most, f"write {wanted}")
    if most_warmup is not None and most_warmup < warmup:
        remedy_text = f"write {warmup} (--warmup) or more"
        yield ConfigError.for_field("--max-warmup", most_warmup, remedy_text)
    if most_warmup is not None and warmup < most_warmup < WARMUP_LOOKBACK:
        remedy_text = (
            f"write {WARMUP_LOOKBACK} or more: fewer batches cannot show whether times are steady; "
            f"for exactly that many write --warmup {most_warmup} too"
        )
        yield ConfigError.for_field("--max-warmup", most_warmup, remedy_text)


def _arguments_refused(given: Mapping[str, Any], flag: str) -> Iterator[ConfigError]:
    """Arguments of vLLM's LLM() that nwor-bench sets or reads, under this flag."""
    for name in ("block_size", "kv_cache_memory_bytes"):  # memory is computed from them
        value = given.get(name, 1)
        if type(value) is not int or value < 1:
            yield ConfigError.for_field(f"{flag}: {name}", value, "write 1 or more")
    for name in given:
        if "-" in name:
            fixed = name.lstrip("-").replace("-", "_")
            yield ConfigError.for_field(flag, name, f"write {fixed!r}, as vLLM's LLM()")
        if flag == "--against" and name == SPECULATION:
            if not isinstance(given[name], dict):
                yield ConfigError.for_field(f"{flag}: {name}", given[name], "write an object")
        elif name in _NOT_FOR_ENGINE_ARGS:
            remedy_text = _NOT_FOR_ENGINE_ARGS[name]
            if flag == "--against" and remedy_text.startswith("use --"):
                remedy_text = f"both engines have the same; {remedy_text} for both"
            yield ConfigError.for_field(flag, name, remedy_text)
