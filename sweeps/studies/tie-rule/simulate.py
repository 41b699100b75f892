"""Error rates of the tie rule, simulated: sound cells, and one that takes a near second-best token.

    python sweeps/studies/tie-rule/simulate.py [--trials 1000]

Two candidates' logits are drawn so that a share of 0.5 positions a nat is near a tie (SmolLM2: 49
of 320 positions within 0.3 nats). Each way of computing adds a normal error to both, then rounds
them to bf16's step. The rule gets what the gate gives it: mode off's decoding, attention moved by a
rounding step at 128 positions, three batch shapes, and the cell's tokens. The step's error gives
gaps the 0.12 nats rms of an H200. Printed as CSV: how many of 100 cells the rule refuses.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from random import Random

from nwor_bench.analysis.parity.ties import (
    Place,
    PlaceVerdict,
    TopLogprobs,
    error_scale,
    together_outside,
)

SHAPES = 3
DENSITY = 0.5
"""Share of positions per nat of the gap, near 0."""


@dataclass(frozen=True)
class Machine:
    """How logits err: mode off's own error, another kernel's, and rounding, in nats."""

    own: float = 0.02
    other: float = 0.08
    step: float = 0.125

    def top(self, random: Random, gap: float, error: float) -> TopLogprobs:
        """The two candidates' log probabilities, from one way of computing them."""
        logits = (20 + gap / 2 + random.gauss(0, error), 20 - gap / 2 + random.gauss(0, error))
        first, second = (round(x / self.step) * self.step if self.step else x for x in logits)
        return {1: first - 20, 2: second - 20}


def likeliest(top: TopLogprobs) -> int:
    """The token that greedy decoding takes: the first of equals."""
    return min(top, key=lambda token: (-top[token], token))


def refused(
    random: Random,
    machine: Machine,
    tokens: int,
    second_below: float | None = None,
    positions: int = 128,
    same_kernel: bool = False,
) -> str | None:
    """Why the rule refuses a cell of so many tokens; None if it passes.

    Args:
        second_below: the planted fault: the cell takes the second-best token if the gap is smaller.
        positions: of which the error is measured.
        same_kernel: the cell and mode off have one kernel.
    """
    gaps = [random.uniform(-1, 1) / DENSITY for _ in range(tokens)]
    decoded = [machine.top(random, gap, machine.own) for gap in gaps]
    asked = [[machine.top(random, gap, machine.own) for gap in gaps] for _ in range(SHAPES)]
    nudged = [machine.top(random, gap, machine.other) for gap in gaps]
    cell = [machine.top(random, g, machine.own if same_kernel else machine.other) for g in gaps]
    sample = [i * tokens // min(positions, tokens) for i in range(min(positions, tokens))]
    scale = error_scale(
        [decoded[i] for i in sample],
        [nudged[i] for i in sample],
        [[shape[i] for i in sample] for shape in asked],
        decoded,
        same_kernel=same_kernel,
    )
    verdicts = []
    for i, (reference, top) in enumerate(zip(map(likeliest, decoded), cell, strict=True)):
        token = likeliest(top)
        if second_below is not None and abs(top[1] - top[2]) < second_below:
            token = 3 - token
        if token != reference:
            signed = [shape[i][reference] - shape[i][token] for shape in asked]
            verdicts.append(PlaceVerdict(Place(0, i, reference, token), tuple(signed), scale))
    for verdict in verdicts:
        if not verdict.is_tie:
            return verdict.describe()
    return together_outside([v.gap or 0.0 for v in verdicts], scale, tokens)


def rate(trials: int, *case: object, **more: object) -> float:
    """The share of trials in which the rule refuses."""
    random = Random(8)
    return sum(refused(random, *case, **more) is not None for _ in range(trials)) / trials  # type: ignore[arg-type]


CASES = {
    "bf16, another kernel": (Machine(), {}),
    "bf16, another kernel, 32 positions": (Machine(), {"positions": 32}),
    "bf16, mode off's kernel, 32 positions": (Machine(), {"positions": 32, "same_kernel": True}),
    "no rounding, another kernel": (Machine(step=0.0), {}),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    out = csv.writer(sys.stdout)
    out.writerow(["case", "tokens", "sound_refused", "second_best_below_0.3_refused"])
    for name, (machine, more) in CASES.items():
        for tokens in (40, 80, 160, 320, 1024):
            both = (rate(trials, machine, tokens, below, **more) for below in (None, 0.3))
            out.writerow([name, tokens, *(f"{share:.3f}" for share in both)])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
