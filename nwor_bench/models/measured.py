"""What staging did to a window's time on an H200, by setting: rows of a study that ships.

`plan` shows the rows nearest to a model; a run on a CPU says how many were faster.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import log

from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs.pair import load_pair, pair_names
from nwor_bench.models.shape import ModelShape
from nwor_bench.records.types import Verdict
from nwor_bench.workload.toml_file import resource_dir

FILES = (
    "studies/interleave/cells.csv",
    "studies/two-clocks/cells.csv",
    "studies/states/windows.csv",
)
"""The oldest first: a setting's last row counts. The last one is of recurrent states."""

DRAFTS = "4"
"""Draft tokens of the settings."""

STAGED = ("stage x graph", "stage x adaptive")
ACCEPTANCE = "2.6"
"""Tokens that a request gains per window in most of the settings."""

AS_STOCK = "as stock"
"""In place of a verdict: what stages was measured slower, so windows are written as stock does."""


@dataclass(frozen=True)
class MeasuredRow:
    """The ratio of a window's time with NWOR and SCV on to stock's, with its 95 % interval."""

    pair: str
    weights: str
    """vLLM's `quantization`; empty for the pair's own dtype."""
    requests: int
    context: int | None
    """Tokens of context; None for real text, whose prompts differ."""
    cache: str
    """vLLM's kv_cache_dtype; auto is bfloat16 here."""
    ratio: float | None
    """None if the verdict is AS_STOCK."""
    low: float | None
    high: float | None
    verdict: str
    """Verdict of the run: FASTER, SLOWER, another one if it was undecided, or AS_STOCK."""

    @property
    def model(self) -> str:
        """For people: the pair, and how its weights are quantised."""
        return f"{self.pair}, {self.weights}" if self.weights else self.pair


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """The last run of each setting that gave an answer on an H200, at the usual acceptance."""
    by_setting = {}
    for row in _staged_rows():
        direct = row["verdict"] == Verdict.INEFFECTIVE
        if not direct and not row["ratio_ci_low"]:
            continue
        weights = row.get("weights", "")
        setting = (row["pair"], weights, row["requests"], row["context"], row["cache"])
        numbers = (row["ratio_to_off"], row["ratio_ci_low"], row["ratio_ci_high"])
        ratio, low, high = (None if direct else float(number) for number in numbers)
        by_setting[setting] = MeasuredRow(
            pair=row["pair"],
            weights=weights,
            requests=int(row["requests"]),
            context=int(row["context"]) if row["context"] else None,
            cache=row["cache"],
            ratio=ratio,
            low=low,
            high=high,
            verdict=AS_STOCK if direct else row["verdict"],
        )
    return tuple(by_setting.values())


def _staged_rows() -> Iterator[dict[str, str]]:
    for name in FILES:
        with (resource_dir("sweeps") / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                usual = row.get("acceptance", ACCEPTANCE) in (ACCEPTANCE, "")
                usual &= row.get("drafts", DRAFTS) == DRAFTS and not row.get("against")
                if row["cell"] in STAGED and usual and "H100" not in row.get("gpu", ""):
                    yield row


def outcomes(rows: Sequence[MeasuredRow]) -> str:
    """`faster in 13 of 20 settings, slower in 4, undecided in 1, left to stock in 2`, of whole
    models: a quarter of the layers is none."""
    rows = [row for row in rows if "quarter" not in row.pair]
    counts = Counter(row.verdict for row in rows)
    faster, slower, direct = (counts[v] for v in (Verdict.FASTER, Verdict.SLOWER, AS_STOCK))
    rest = len(rows) - faster - slower - direct
    return (
        f"faster in {faster} of {len(rows)} settings, slower in {slower}, undecided in {rest}, "
        f"left to stock in {direct}"
    )


def nearest_rows(
    shape: ModelShape, requests: int, context: int, most: int = 3
) -> tuple[MeasuredRow, ...]:
    """The measured settings most like this one, the nearest first; none if no model of the kind was
    measured.

    Models are of one kind if they have the same attention (latent or not), recurrent states and
    experts or none; parameters, requests and context then count by their ratios.
    """

    def distance(setting: tuple[MeasuredRow, ModelShape]) -> float:
        row, model = setting
        ratios = (
            (shape.parameters(), model.parameters()),
            (requests, row.requests),
            (context, row.context or context),
        )
        return sum(abs(log(mine / other)) for mine, other in ratios)

    shapes = ((row, _shape_of(row.pair)) for row in measured_rows())
    alike = [
        (row, model) for row, model in shapes if model is not None and _kind(model) == _kind(shape)
    ]
    alike.sort(key=lambda setting: (distance(setting), setting[0].weights))
    return tuple(row for row, _ in alike[:most])


def _kind(shape: ModelShape) -> tuple[bool, str, bool]:
    states = "" if shape.state is None else shape.state.kind
    return shape.mla is not None, states, shape.experts is not None


@cache
def _shape_of(pair: str) -> ModelShape | None:
    """The shape of a shipped pair; None if it has no config.json of its own."""
    source = load_pair(pair).shape if pair in pair_names() else None
    if source is None:
        return None
    return read_shape(source.target, "--pair", pair)
