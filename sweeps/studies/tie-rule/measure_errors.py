"""Gaps of the two likeliest tokens at every output position, and how far mode off moves them.

    python sweeps/studies/tie-rule/measure_errors.py [--requests 8] [--tokens 40] > smollm2-cpu.csv

SmolLM2 in bfloat16 in mode off. Columns in nats: `decoded` while it generates; of the 128 positions
that the tie check samples also `shapes`, the mean over its three batch shapes, and `nudged`, with
every layer's attention moved by one rounding step. The kept CSV is of a CPU (AMD EPYC, vLLM 0.32).
"""

import argparse
import csv
import sys

from nwor_bench.analysis.parity.ties import gap_between, leading_two
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.preflight import TOP
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import MAX_POSITIONS, TieCheck, spread
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    given = parser.parse_args()
    pair, scenario = resolve_pair("smollm2"), load_scenario("short")
    amount = {"requests": given.requests, "max_new_tokens": given.tokens}
    engine = VllmEngine(pair, resolve(scenario, **amount, dtype="bfloat16"))
    prompts = encode(
        load_prompts(scenario)[: given.requests], load_tokenizer(pair.target), 1024, given.tokens
    )
    off = Cell(pair.name, NworMode.OFF, ScvMode.OFF)
    ties = TieCheck(engine, off, lambda: prompts, given.tokens, ignore_eos=True)
    engine.set_modes(off)
    lengths = [given.tokens] * given.requests
    outputs = engine.decode_greedily(prompts, lengths, ignore_eos=True, top=TOP)
    spots = spread(lengths, MAX_POSITIONS)
    prefixes = [(*prompts[r], *outputs[r].token_ids[:at]) for r, at in spots]
    shapes = ties._shapes(prefixes)
    nudged = ties._next_tokens(prefixes, nudged=True)
    engine.close()
    sampled = {spot: tops for spot, *tops in zip(spots, nudged, *shapes, strict=True)}
    out = csv.writer(sys.stdout)
    out.writerow(["request", "position", "decoded", "shapes", "nudged"])
    for request, output in enumerate(outputs):
        for at, top in enumerate(output.top):
            two = leading_two(top)
            assert two is not None
            gaps = [gap_between(each, *two) for each in sampled.get((request, at), ())]
            known = [gap for gap in gaps if gap is not None]
            both = [sum(known[1:]) / 3, known[0]] if len(known) == 4 else ["", ""]
            out.writerow([request, at, gap_between(top, *two), *both])


if __name__ == "__main__":
    main()
