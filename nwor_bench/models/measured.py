"""What staging did to a window's time on an H200, by setting: rows of a study that ships.

`plan` shows the rows nearest to a model; a run on a CPU says how many were faster.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log

from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs.pair import load_pair, pair_names
from nwor_bench.models.shape import ModelShape
from nwor_bench.records.types import Verdict
from nwor_bench.workload.toml_file import resource_dir

FILE = "studies/interleave/cells.csv"
STAGED = "stage x graph"
ACCEPTANCE = "2.6"
"""Tokens that a request gains per window in most of the study's settings."""


@dataclass(frozen=True)
class MeasuredRow:
    """The ratio of a window's time with NWOR and SCV on to stock's, with its 95 % interval."""

    pair: str
    requests: int
    context: int | None
    """Tokens of context; None for real text, whose prompts differ."""
    cache: str
    """vLLM's kv_cache_dtype; auto is bfloat16 here."""
    ratio: float
    low: float
    high: float
    verdict: str
    """That of the run: FASTER, SLOWER or, if it was undecided, another one."""


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """The last run of each setting that gave an interval, at the usual acceptance."""
    with (resource_dir("sweeps") / FILE).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["cell"] == STAGED]
    found = {}
    for row in rows:
        if row["ratio_ci_low"] and row["acceptance"] in (ACCEPTANCE, ""):
            setting = (row["pair"], row["requests"], row["context"], row["cache"])
            found[setting] = MeasuredRow(
                pair=row["pair"],
                requests=int(row["requests"]),
                context=int(row["context"]) if row["context"] else None,
                cache=row["cache"],
                ratio=float(row["ratio_to_off"]),
                low=float(row["ratio_ci_low"]),
                high=float(row["ratio_ci_high"]),
                verdict=row["verdict"],
            )
    return tuple(found.values())


def outcomes(rows: Sequence[MeasuredRow]) -> str:
    """`faster in 13 of 20 settings, slower in 4, undecided in 3`."""
    counts = Counter(row.verdict for row in rows)
    faster, slower = counts[Verdict.FASTER], counts[Verdict.SLOWER]
    rest = len(rows) - faster - slower
    return f"faster in {faster} of {len(rows)} settings, slower in {slower}, undecided in {rest}"


def nearest_rows(
    shape: ModelShape, requests: int, context: int, most: int = 3
) -> tuple[MeasuredRow, ...]:
    """The measured settings most like this one, the nearest first.

    Shapes are alike if they have the same kind of attention (latent, recurrent layers or neither)
    and experts or not; then parameters, requests and context count by their ratios.
    """

    def distance(setting: tuple[MeasuredRow, ModelShape]) -> float:
        row, own = setting
        unlike = sum(mine != other for mine, other in zip(_kind(shape), _kind(own), strict=True))
        ratios = (
            (shape.parameters(), own.parameters()),
            (requests, row.requests),
            (context, row.context or context),
        )
        return 10 * unlike + sum(abs(log(mine / other)) for mine, other in ratios)

    shapes = ((row, _shape_of(row.pair)) for row in measured_rows())
    known = [(row, own) for row, own in shapes if own is not None]
    return tuple(row for row, _ in sorted(known, key=distance)[:most])


def _kind(shape: ModelShape) -> tuple[bool, bool, bool]:
    return shape.mla is not None, shape.recurrent is not None, shape.experts is not None


@cache
def _shape_of(pair: str) -> ModelShape | None:
    """The shape of a shipped pair; None if it has no config.json of its own."""
    source = load_pair(pair).shape if pair in pair_names() else None
    if source is None:
        return None
    return read_shape(source.target, "pair", pair)
