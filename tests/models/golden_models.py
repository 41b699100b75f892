"""Answers of `plan` for many config.json: kept in `golden/models.csv`, one a row.

A changed answer is a decision; `PYTHONPATH=tests:. python tests/models/golden_models.py` writes the
table anew.
"""

import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recipe_models import CONTENT
from small_configs import VARIANTS

from nwor_bench.cli.commands.plan import MODEL, NotCovered, predict
from nwor_bench.errors import ConfigError
from nwor_bench.instruments.cards import Device
from nwor_bench.models.byte_model import Workload
from nwor_bench.models.config_reader import chosen_cache_dtype
from nwor_bench.models.pairs import load_pair, pair_names
from nwor_bench.models.support.facts import EngineFacts, read_facts
from nwor_bench.models.support.predict import methods_of, predict_support
from nwor_bench.report.plan_bytes import bytes_values
from nwor_bench.report.support import notes, support_values

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "golden/models.csv"

ENGINES = {
    "hopper": EngineFacts(),
    "blackwell": EngineFacts(Device.BLACKWELL),
    "ampere": EngineFacts(Device.AMPERE),
    "cpu": EngineFacts(Device.CPU),
    "hopper, 16 drafts": EngineFacts(draft_tokens=16),
    "hopper, fp8": EngineFacts(cache_dtype="fp8"),
    "blackwell, fp8_e5m2": EngineFacts(Device.BLACKWELL, cache_dtype="fp8_e5m2"),
    "cpu, fp8": EngineFacts(Device.CPU, cache_dtype="fp8"),
}
LOADS = {
    "plan": (Workload(8, 1024, 4, 0.5), "auto", "auto"),
    "plan of 2 ranks, fp8": (Workload(64, 8192, 7, 0.3, 2), "fp8", "int4"),
}


class GoldenRow(NamedTuple):
    """One answer: the reason or the refusal, and a digest of everything that was said."""

    model: str
    asked: str
    answer: str
    digest: str


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Recipe models, published models, pairs that ship, and small variants for each rule."""
    yield from ((entry["name"], entry["config"]) for entry in CONTENT["models"])
    for path in sorted((TESTS / "data/configs").glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))
    for name in pair_names():
        shape = load_pair(name).shape
        if shape is not None:
            yield name, shape.target
    yield from VARIANTS.items()


def rows() -> Iterator[GoldenRow]:
    """Every answer of today's code."""
    for name, config in configs():
        for asked, engine in ENGINES.items():
            yield _supports(name, config, asked, engine)
        for asked, (load, cache, weights) in LOADS.items():
            yield _plan(name, config, asked, load, cache, weights)


def _supports(name: str, config: dict[str, Any], asked: str, engine: EngineFacts) -> GoldenRow:
    engine = replace(engine, cache_dtype=chosen_cache_dtype(config, engine.cache_dtype))
    try:
        model = read_facts(config, name, MODEL, name)
        found, methods = predict_support(model, engine), tuple(methods_of(model, engine))
    except ConfigError as error:
        return GoldenRow(name, asked, str(error), "")
    said = [support_values(found, methods), notes(found)]
    return GoldenRow(name, asked, found.reason or found.part.value, _digest(said))


def _plan(
    name: str, config: dict[str, Any], asked: str, load: Workload, cache: str, weights: str
) -> GoldenRow:
    try:
        values = bytes_values(predict(name, config, load, cache, weights))
    except (ConfigError, NotCovered) as error:
        return GoldenRow(name, asked, str(error), "")
    return GoldenRow(name, asked, "", _digest(values))


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


def kept() -> list[GoldenRow]:
    """The table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [GoldenRow(*row) for row in csv.reader(file)][1:]


if __name__ == "__main__":
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([GoldenRow._fields, *rows()])
