"""A whole sweep of the tiny pair on a stand-in engine, begun and resumed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, accept_arguments

from nwor_bench.errors import ExitCode
from nwor_bench.run.prepare import PairChoice, resume_one, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.config import RunSpec, load_scenario, resolve

RUN = Path("run")


def spec_of(**flags: Any) -> RunSpec:
    small = {"requests": 2, "batches": 2, "max_new_tokens": 6, "max_warmup": 1}
    return resolve(load_scenario("short"), **{**small, **flags})


def begin(
    engine: FakeEngine | Callable[..., FakeEngine],
    *,
    check: Callable[..., None] = accept_arguments,
    output: Path | None = RUN,
    **flags: Any,
) -> ExitCode:
    """Run it on this engine, or on what this function starts."""
    return run_one(
        spec_of(**flags),
        PairChoice(pair="tiny"),
        RunOptions(output=output),
        engine_factory=started(engine),
        check_engine=check,
    )


def go_on(engine: FakeEngine | None = None, given: Mapping[str, Any] | None = None) -> ExitCode:
    factory = started(engine or FakeEngine())
    return resume_one(RUN, given or {}, engine_factory=factory, check_engine=accept_arguments)


def started(engine: FakeEngine | Callable[..., FakeEngine]) -> Callable[..., FakeEngine]:
    return (lambda *_: engine) if isinstance(engine, FakeEngine) else engine
