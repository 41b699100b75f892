"""The runs that a sweep file's axes span, each with its configuration, grouped by engine. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from nwor_bench.errors import ConfigError
from nwor_bench.workload.config import Overrides, RunSpec, resolve
from nwor_bench.workload.scenario import load_scenario
from nwor_bench.workload.sweep_file import SweepFile


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its number from 1, its place on the axes, its configuration."""

    number: int
    pair: str
    scenario: str
    spec: RunSpec

    @property
    def axes(self) -> dict[str, str | int | float | None]:
        """Its place on the axes, by name."""
        scenario = self.spec.scenario
        return {
            "pair": self.pair,
            "scenario": self.scenario,
            "draft_tokens": scenario.draft_tokens,
            "requests": scenario.requests,
            "temperature": scenario.temperature,
            "dtype": self.spec.dtype,
            "cache_dtype": self.cache_dtype,
            "acceptance_length": self.acceptance_length,
        }

    @property
    def cache_dtype(self) -> str | None:
        """vLLM's kv_cache_dtype, where the file names one."""
        return self.spec.engine_args.get("kv_cache_dtype")

    @property
    def acceptance_length(self) -> float | None:
        """The synthetic acceptance length, where the file names one."""
        return (self.spec.speculative_config or {}).get("synthetic_acceptance_length")

    @property
    def label(self) -> str:
        """For people: `tiny short, 4 drafts, 8 requests, temperature 0, float32`."""
        scenario = self.spec.scenario
        text = (
            f"{Path(self.pair).stem} {scenario.name}, {scenario.draft_tokens} drafts, "
            f"{scenario.requests} requests, temperature {scenario.temperature:g}"
        )
        if self.spec.dtype is not None:
            text += f", {self.spec.dtype}"
        if self.cache_dtype is not None:
            text += f", {self.cache_dtype} cache"
        if self.acceptance_length is not None:
            text += f", acceptance length {self.acceptance_length:g}"
        return text

    @property
    def folder(self) -> str:
        """Its run folder within the sweep's: `03-tiny-short-k4-r8`."""
        scenario = self.spec.scenario
        parts = [f"{self.number:02d}", Path(self.pair).stem, scenario.name]
        parts += [f"k{scenario.draft_tokens}", f"r{scenario.requests}"]
        parts += [f"t{scenario.temperature:g}", self.spec.dtype or ""]
        if self.cache_dtype is not None:
            parts.append(f"kv{self.cache_dtype}")
        if self.acceptance_length is not None:
            parts.append(f"a{self.acceptance_length:g}")
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class EngineGroup:
    """Runs that one engine serves, and the configuration that it is started with.

    `spec` is that of the largest run: room for the most requests and the longest of them.
    """

    number: int
    spec: RunSpec
    points: tuple[Point, ...]


def make_points(sweep: SweepFile) -> tuple[Point, ...]:
    """Every combination of the axes, in the file's order, the last axis fastest.

    Raises ConfigError as `resolve` does, with the run that it concerns.
    """
    axes = sweep.axes
    points = []
    combinations = product(
        axes.pairs,
        axes.scenarios,
        axes.dtype or (None,),
        axes.draft_tokens or (None,),
        axes.requests or (None,),
        axes.temperature or (None,),
        axes.cache_dtype or (None,),
        axes.acceptance_length or (None,),
    )
    for number, values in enumerate(combinations, start=1):
        pair, scenario, dtype, drafts, requests, heat, cache_dtype, length = values
        overrides = Overrides(draft_tokens=drafts, requests=requests, temperature=heat)
        try:
            spec = _spec(sweep, scenario, dtype, overrides, cache_dtype, length)
            _check_length(length, spec.scenario.draft_tokens)
        except ConfigError as error:
            raise ConfigError(f"run {number} ({pair}, {scenario}): {error}") from error
        points.append(Point(number, pair, scenario, spec))
    return tuple(points)


def _check_length(acceptance_length: float | None, draft_tokens: int) -> None:
    """A window gives a request one token at least, and all its drafts and one more at most."""
    if acceptance_length is not None and not 1 <= acceptance_length <= draft_tokens + 1:
        raise ConfigError.for_field(
            "acceptance_length",
            acceptance_length,
            f"write 1 to {draft_tokens + 1}: what a window of {draft_tokens} drafts can give",
        )


def _spec(
    sweep: SweepFile,
    scenario: str,
    dtype: str | None,
    values: Overrides,
    cache_dtype: str | None,
    acceptance_length: float | None,
) -> RunSpec:
    shared = sweep.settings
    engine_args = dict(shared.engine_args)
    if cache_dtype is not None:
        engine_args["kv_cache_dtype"] = cache_dtype
    length = {"synthetic_acceptance_length": acceptance_length}
    overrides = replace(
        values,
        batches=shared.batches,
        warmup=shared.warmup,
        max_new_tokens=shared.max_new_tokens,
        max_model_len=shared.max_model_len,
        seed=shared.seed,
    )
    return resolve(
        load_scenario(scenario),
        overrides,
        nwor_modes=",".join(sweep.axes.nwor_modes),
        scv_modes=",".join(sweep.axes.scv_modes),
        dtype=dtype,
        block_size=shared.block_size,
        tensor_parallel_size=shared.tensor_parallel_size,
        kv_cache_gib=shared.kv_cache_gib,
        engine_args=json.dumps(engine_args),
        speculative_config=None if acceptance_length is None else json.dumps(length),
        ci_width=shared.ci_width,
        max_blocks=shared.max_blocks,
        time_budget=shared.time_budget,
        max_warmup=shared.max_warmup,
        dram_counters=shared.dram_counters,
        launch_counts=shared.launch_counts,
        stage_by=shared.stage_by,
        stage_l2=shared.stage_l2,
    )


def group_by_engine(points: Sequence[Point]) -> tuple[EngineGroup, ...]:
    """The fewest engines: runs whose engine differs in nothing but its room share one.

    Pair, dtypes, draft tokens and acceptance length need an engine of their own;
    requests, scenarios and temperature do not. Groups and their runs keep the order of the
    points.
    """
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        spec = point.spec
        vllm = json.dumps([spec.engine_args, spec.speculative_config], sort_keys=True)
        key = (point.pair, spec.dtype, spec.scenario.draft_tokens, vllm)
        groups.setdefault(key, []).append(point)
    return tuple(
        EngineGroup(number, _roomiest(own), tuple(own))
        for number, own in enumerate(groups.values(), start=1)
    )


def _roomiest(points: Sequence[Point]) -> RunSpec:
    spec = points[0].spec
    room = {
        "requests": max(point.spec.scenario.requests for point in points),
        "max_model_len": max(point.spec.scenario.max_model_len for point in points),
    }
    return replace(spec, scenario=spec.scenario.model_copy(update=room))
