"""`resolve`: a scenario merged with flags or a sweep file."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from nwor_bench.errors import ConfigError
from nwor_bench.records.cell import engine_arm
from nwor_bench.records.state_slots import ADDITIONAL, FIELD, one_slot
from nwor_bench.records.types import Interleave, NworMode, ScvMode, StageBy
from nwor_bench.workload.options import declared, flag_of, names, read_all, remedy
from nwor_bench.workload.run_spec import WARMUP_LOOKBACK, PairChoice, RunSpec, VllmEntries
from nwor_bench.workload.scenario import PromptSource, Scenario, load_scenario, scenario_names
from nwor_bench.workload.scenario_values import MOST_BLOCKS, ScenarioValues

__all__ = [
    "PromptSource",
    "RunSpec",
    "Scenario",
    "flag_of",
    "load_scenario",
    "resolve",
    "scenario_names",
]

_NOT_FOR_ENGINE_ARGS = {
    "tokenizer": "it comes with --target-model",
    "hf_overrides": "memory and bytes are worked out from config.json; change it in a copy of the "
    "model's folder, or write a pair file",
    "worker_extension_cls": "nwor-bench sets it itself",
    "disable_log_stats": "nwor-bench reads vLLM's counters",
} | {
    each.option.engine_argument: f"use {each.flag}"
    for holder in (PairChoice, ScenarioValues, RunSpec)
    for each in declared(holder)
    if each.option.engine_argument is not None
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
    spec = _with_modes_off(RunSpec(scenario=_override(scenario, wanted), **values))
    _check(spec)
    length, drafts = given.get("acceptance_length"), spec.scenario.draft_tokens
    if length is not None and not 1 <= float(length) <= drafts + 1:
        remedy_text = f"write 1 to {drafts + 1}: what a window of {drafts} drafts can give"
        raise ConfigError.for_field("--acceptance-length", length, remedy_text)
    rates = given.get("acceptance_rates")
    if rates is not None and (
        len(rates) != drafts or not all(1 >= a >= b >= 0 for a, b in pairwise([1, *rates]))
    ):
        remedy_text = f"write {drafts} numbers from 1 to 0, none above the one before it"
        raise ConfigError.for_field("--acceptance-rates", rates, remedy_text)
    return spec


_OFF = (NworMode.OFF,), (ScvMode.OFF,)
_STAGED = (NworMode.OFF, NworMode.STAGE), (ScvMode.OFF, ScvMode.GRAPH)
"""Modes with `against`, and with one state slot in its engine, which stages."""


def _with_modes_off(spec: RunSpec) -> RunSpec:
    """With `against`: only off x off, unless other modes are asked for. Several engines are
    compared in whole batches."""
    if spec.engines:
        return replace(spec, interleave=spec.interleave or Interleave.BATCHES)
    if spec.against is None:
        return spec
    given = (spec.nwor_modes, spec.scv_modes)
    if given == (RunSpec.nwor_modes, RunSpec.scv_modes):
        stages = one_slot(spec.against.get(ADDITIONAL))
        nwor, scv = _STAGED if stages else _OFF
        spec = replace(spec, nwor_modes=nwor, scv_modes=scv)
    return replace(spec, interleave=spec.interleave or Interleave.BATCHES)


def _require_known(given: Iterable[str]) -> None:
    holders = (ScenarioValues, RunSpec, VllmEntries)
    unknown = set(given).difference(*(names(declared(each)) for each in holders))
    if unknown:
        raise TypeError(f"no option is called {min(unknown)!r}")


def _add_entries(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Move values of `VllmEntries` into the JSON that vLLM reads."""
    for each in declared(VllmEntries):
        value = given.get(each.name)
        if value is not None and each.option.entry is not None:
            field, key = each.option.entry
            wanted = each.read(value)
            said = values.get(field) or {}
            if key in said and said[key] != wanted:
                remedy_text = f"{flag_of(field)} says {key} {said[key]!r}; give one of the two"
                raise ConfigError.for_field(each.flag, value, remedy_text)
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


def _check(spec: RunSpec) -> None:
    """Rules that concern more than one option."""
    scenario = spec.scenario
    room = scenario.max_new_tokens + scenario.draft_tokens
    if room >= scenario.max_model_len:
        raise ConfigError.for_field(
            "--max-model-len",
            scenario.max_model_len,
            f"write more than {room} (--max-new-tokens {scenario.max_new_tokens} + "
            f"--draft-tokens {scenario.draft_tokens}) so that a prompt has room too",
        )
    _check_amount(spec)
    _check_against(spec)
    _check_cells(spec)
    _check_engine_args(spec.engine_args)
    if one_slot(spec.engine_args.get(ADDITIONAL)):
        remedy_text = "off x off needs a slot for each draft; write it into --against"
        value = spec.engine_args[ADDITIONAL]
        raise ConfigError.for_field(f"--engine-args: {FIELD}", value, remedy_text)
    _check_staging(spec)
    _check_draft_counts(spec)


def _check_cells(spec: RunSpec) -> None:
    """Only cells of the grid can be chosen."""
    for name in spec.only_cells or ():
        nwor, scv = name.modes
        if nwor not in spec.nwor_modes or scv not in spec.scv_modes:
            remedy_text = "its modes are not among --nwor-modes and --scv-modes; add them"
            raise ConfigError.for_field("--cells", name.value, remedy_text)


def _check_draft_counts(spec: RunSpec) -> None:
    """Draft counts are compared with k = 0, and staged ones with those of mode off."""
    counts = spec.draft_counts
    _check_engines(spec)
    if counts is None:
        return
    if spec.against is not None:
        remedy_text = "draft counts alternate in one engine, and it compares two; leave one out"
        raise ConfigError.for_field("--against", engine_arm(spec.against), remedy_text)
    most = spec.scenario.draft_tokens
    if 0 not in counts or max(counts) != most or min(counts) < 0:
        remedy_text = f"write 0 and counts up to draft_tokens, which is {most}, that one too"
        raise ConfigError.for_field("draft_counts", list(counts), remedy_text)
    _check_modes_of_draft_counts(spec)
    if spec.interleave is Interleave.BATCHES and not spec.engines:
        remedy_text = "draft counts alternate within a batch; leave it out"
        raise ConfigError.for_field("--interleave", spec.interleave.value, remedy_text)
    given = "num_speculative_tokens_per_batch_size"
    if given in (spec.speculative_config or {}):
        remedy_text = "nwor-bench sets it, to change the draft count; leave it out"
        raise ConfigError.for_field(f"--speculative-config: {given}", True, remedy_text)


def _check_engines(spec: RunSpec) -> None:
    """One engine a draft count: in mode off, in whole batches. Adaptive verification needs them."""
    if spec.adaptive_verification and not spec.engines:
        remedy_text = "it needs an engine of its own; write engines = true (worth: --engines) too"
        raise ConfigError.for_field("--adaptive-verification", True, remedy_text)
    if not spec.engines:
        return
    if spec.draft_counts is None:
        remedy_text = "it starts an engine for each draft count; write draft_counts too"
        raise ConfigError.for_field("--engines", True, remedy_text)
    if spec.stages:
        remedy_text = "with an engine for each draft count (--engines) NWOR is off; write off"
        raise ConfigError.for_field("--nwor-modes", ",".join(spec.nwor_modes), remedy_text)
    _check_several_engines(spec, "--engines")


def _check_several_engines(spec: RunSpec, flag: str) -> None:
    """Several engines alternate by whole batches, each in a process of its own."""
    if spec.interleave is Interleave.WINDOWS:
        remedy_text = f"engines alternate by whole batches ({flag}); leave it out"
        raise ConfigError.for_field("--interleave", spec.interleave.value, remedy_text)
    if spec.counters is not None:
        remedy_text = f"counters are read in one process ({flag} starts several); leave it out"
        raise ConfigError.for_field("--counters", spec.counters.value, remedy_text)


def _check_modes_of_draft_counts(spec: RunSpec) -> None:
    """Each count runs in mode off, and with at most one SCV mode in mode stage."""
    if NworMode.CONTROL in spec.nwor_modes:
        remedy_text = "draft counts have no control; write off, or off and stage"
        raise ConfigError.for_field("--nwor-modes", ",".join(spec.nwor_modes), remedy_text)
    most = 2 if spec.stages else 1
    if spec.scv_modes[0] is not ScvMode.OFF or len(spec.scv_modes) > most:
        example = "off and the one mode of staged windows" if spec.stages else "off: nothing stages"
        remedy_text = f"with draft counts write {example}"
        raise ConfigError.for_field("--scv-modes", ",".join(spec.scv_modes), remedy_text)
    if spec.only_cells is not None:
        remedy_text = "draft counts are the cells; leave it out"
        raise ConfigError.for_field("--cells", ",".join(spec.only_cells), remedy_text)


def _check_against(spec: RunSpec) -> None:
    """Engines are compared in mode off, in whole batches, and differ in what `against` says."""
    against = spec.against
    if against is None:
        return
    if not against:
        example = "write an argument, such as '{\"enable_prefix_caching\": false}'"
        raise ConfigError.for_field("--against", against, example)
    _check_engine_args(against, "--against")
    for name, value in against.items():
        if name in spec.engine_args and spec.engine_args[name] == value:
            remedy_text = "--engine-args gives it to both engines; leave it out"
            raise ConfigError.for_field(f"--against: {name}", value, remedy_text)
    _check_modes_of_engines(spec, against)
    _check_several_engines(spec, "--against")


def _check_modes_of_engines(spec: RunSpec, against: Mapping[str, Any]) -> None:
    """Both engines run in off x off; one with a single state slot stages, in one SCV mode."""
    allowed: list[Any] = [_OFF]
    remedy_text = "it compares two engines with NWOR and SCV off; leave the modes and cells out"
    if one_slot(against.get(ADDITIONAL)):
        of_staged = ((), (ScvMode.GRAPH,), (ScvMode.ADAPTIVE,))
        allowed = [(_STAGED[0], (ScvMode.OFF, *scv)) for scv in of_staged]
        remedy_text = (
            "its engine stages; leave out the cells and all modes but --scv-modes off,MODE"
        )
    if (spec.nwor_modes, spec.scv_modes) not in allowed or spec.only_cells is not None:
        raise ConfigError.for_field("--against", engine_arm(against), remedy_text)


def _check_staging(spec: RunSpec) -> None:
    """Only mode `stage` holds drafts."""
    if spec.stage_by is not StageBy.REFERENCE and NworMode.STAGE not in spec.nwor_modes:
        remedy_text = "no cell stages; write --nwor-modes off,stage or leave it out"
        raise ConfigError.for_field("stage_by", spec.stage_by.value, remedy_text)


def _check_amount(spec: RunSpec) -> None:
    """How much to measure: the flags must not contradict each other."""
    batches, warmup = spec.scenario.batches, spec.scenario.warmup
    if spec.checks_only:
        timing = {"ci_width": spec.ci_width, "time_budget": spec.time_budget_s,
                  "max_blocks": spec.max_blocks, "max_warmup": spec.max_warmup,
                  "counters": spec.counters}  # fmt: skip
        for name, value in timing.items():
            if value is not None:
                remedy_text = f"{flag_of(name)} is for timed blocks; write --batches 1 or more"
                raise ConfigError.for_field("--batches", batches, remedy_text)
    if spec.max_blocks is not None:
        if spec.ci_width is None and spec.time_budget_s is None:
            raise ConfigError.for_field(
                "--max-blocks",
                spec.max_blocks,
                "it bounds --ci-width and --time-budget; write one of them too, or only --batches",
            )
        if not batches <= spec.max_blocks <= MOST_BLOCKS:
            wanted = f"{MOST_BLOCKS} or less"
            if spec.max_blocks < batches:
                wanted = f"{batches} (--batches) or more"
            raise ConfigError.for_field("--max-blocks", spec.max_blocks, f"write {wanted}")
    if spec.max_warmup is not None and spec.max_warmup < warmup:
        raise ConfigError.for_field(
            "--max-warmup", spec.max_warmup, f"write {warmup} (--warmup) or more"
        )
    if spec.max_warmup is not None and warmup < spec.max_warmup < WARMUP_LOOKBACK:
        raise ConfigError.for_field(
            "--max-warmup",
            spec.max_warmup,
            f"write {WARMUP_LOOKBACK} or more: fewer batches cannot show whether times are steady; "
            f"for exactly that many write --warmup {spec.max_warmup} too",
        )


def _check_engine_args(given: Mapping[str, Any], flag: str = "--engine-args") -> None:
    for name in ("block_size", "kv_cache_memory_bytes"):  # memory is computed from them
        value = given.get(name, 1)
        if type(value) is not int or value < 1:
            raise ConfigError.for_field(f"{flag}: {name}", value, "write 1 or more")
    for name in given:
        if "-" in name:
            fixed = name.lstrip("-").replace("-", "_")
            raise ConfigError.for_field(flag, name, f"write {fixed!r}, as vLLM's LLM()")
        if name in _NOT_FOR_ENGINE_ARGS:
            remedy_text = _NOT_FOR_ENGINE_ARGS[name]
            if flag == "--against" and remedy_text.startswith("use --"):
                remedy_text = f"both engines have the same; {remedy_text} for both"
            raise ConfigError.for_field(flag, name, remedy_text)
