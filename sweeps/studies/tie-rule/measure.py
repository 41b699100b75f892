"""How often the tie rule accepts a token, on a live engine in bfloat16.

    python sweeps/studies/tie-rule/measure.py masked [--pair smollm2] [--requests 8] [--tokens 64]
    python sweeps/studies/tie-rule/measure.py nudged --sets 8 --tokens 40
    python sweeps/studies/tie-rule/measure.py errors --tokens 40 > smollm2-cpu.csv

The gate's own check decides (`nwor_bench.run.gate.ties`). Needs a GPU, or a CPU with fast bfloat16.

`masked`: the share of output positions whose two likeliest tokens lie within the allowance; and of
the tokens that change when the model may not see an eighth of the context (behind its first token,
at a place drawn per request), how many are called ties, taken one by one. The gate as a whole is
stricter: one token that is no tie makes a cell INVALID, and so do ties that together lie too far
apart. Mode off's own flips between batch shapes must pass.

`nudged`: false alarms. A second attention kernel that is as right as the first differs from it by
about a rounding step. Here every layer's attention returns values one rounding step up or down
while mode off decodes (`nwor_bench.plugin.observe.attention_nudge`), and the gate decides on the
differing tokens as on a staging cell's: behind each tie it goes on from the reference's token, to
the end. Every set of prompts that is called INVALID is a false alarm. Eagerly: replayed CUDA graphs
hold attention as it was captured.

`errors`: gaps of the two likeliest tokens at every output position, and how far mode off moves
them. Columns in nats: `decoded` while it generates; of the 128 positions that the check samples
also `shapes`, the mean over its three batch shapes, and `nudged`, with every layer's attention
moved by one rounding step. The kept CSV is of a CPU (AMD EPYC, vLLM 0.32).
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random

import torch

from nwor_bench.analysis.parity.ties import (
    Place,
    PlaceVerdict,
    gap_between,
    leading_two,
    together_outside,
)
from nwor_bench.analysis.parity.tokens import Tokens, check_tokens
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.preflight import TOP
from nwor_bench.engine.protocol import GreedyOutput
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import MAX_POSITIONS, TieCheck, spread
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer


class OffEngine:
    """vLLM in mode off, and prompts."""

    def __init__(self, given: argparse.Namespace, sets: int = 1, eager: bool = False):
        self.pair, scenario = resolve_pair(given.pair), load_scenario("short")
        self.off = Cell(self.pair.name, NworMode.OFF, ScvMode.OFF)
        self.tokens: int = given.tokens
        spec = resolve(
            scenario, requests=given.requests, max_new_tokens=given.tokens, seed=given.seed,
            dtype="bfloat16", engine_args='{"enforce_eager": true}' if eager else None,
        )  # fmt: skip
        texts = load_prompts(scenario)[: sets * given.requests]
        self.prompts = encode(texts, load_tokenizer(self.pair.target), 1024, given.tokens)
        self.engine = VllmEngine(self.pair, spec)
        self.engine.set_modes(self.off)

    def decode(self, prompts: Tokens, top: int = 0) -> list[GreedyOutput]:
        """Greedy outputs, all of one length."""
        lengths = [self.tokens] * len(prompts)
        return self.engine.decode_greedily(prompts, lengths, ignore_eos=True, top=top)

    def check(self, prompts: Tokens, kind: type[TieCheck] = TieCheck) -> TieCheck:
        """The gate's check of these prompts."""
        return kind(self.engine, self.off, lambda: prompts, self.tokens, ignore_eos=True)


def masked_tokens(target: str, prompts: Tokens, outputs: Tokens, seed: int) -> list[list[int]]:
    """The likeliest token at each position for a model that misses an eighth of the context."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).to(device).eval()
    found = []
    for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = torch.tensor([[*prompt, *output[:-1]]], device=device)
        seen = torch.ones_like(ids)
        hidden = max(1, len(prompt) // 8)
        start = Random(f"{seed}:{request}").randrange(1, max(2, len(prompt) - hidden))
        seen[0, start : start + hidden] = 0
        with torch.no_grad():
            logits = model(ids, attention_mask=seen).logits[0, len(prompt) - 1 :]
        found.append(logits.argmax(dim=1).tolist())
    return found


def leading_places(engine: VllmEngine, prompts: Tokens, outputs: Tokens) -> list[Place]:
    """The likeliest and the second likeliest token of every output position."""
    where = [(r, at) for r, output in enumerate(outputs) for at in range(len(output))]
    prefixes = [[*prompts[r], *outputs[r][:at]] for r, at in where]
    tops = engine.decode_greedily(prefixes, [1] * len(prefixes), ignore_eos=True, top=TOP)
    places = []
    for (request, at), output in zip(where, tops, strict=True):
        two = leading_two(output.top[0])
        assert two is not None
        places.append(Place(request, at, *two))
    return places


def changed_places(masked: Tokens, outputs: Tokens) -> list[Place]:
    """Places where the masked model, after the reference's tokens, predicts another token."""
    return [
        Place(request, at, token, other)
        for request, (others, output) in enumerate(zip(masked, outputs, strict=True))
        for at, (token, other) in enumerate(zip(output, others, strict=True))
        if other != token
    ]


def share(name: str, found: list[PlaceVerdict]) -> str:
    """Places that are ties."""
    ties = sum(verdict.is_tie for verdict in found)
    return f"{name}: {ties} of {len(found)} ({ties / len(found):.1%})"


def together(ties: list[PlaceVerdict], tokens: int) -> str:
    """The gate's verdict on all ties of so many tokens together."""
    gaps = [verdict.gap or 0.0 for verdict in ties]
    return (ties and together_outside(gaps, ties[0].scale, tokens)) or "sound"


def masked(given: argparse.Namespace) -> None:
    """Positions within the allowance, and changed tokens that are called ties."""
    run = OffEngine(given)
    outputs = [list(output.token_ids) for output in run.decode(run.prompts)]
    others = masked_tokens(run.pair.target, run.prompts, outputs, given.seed)
    ties = run.check(run.prompts)
    leading = ties.check(run.prompts, outputs, leading_places(run.engine, run.prompts, outputs))
    changed = ties.check(run.prompts, outputs, changed_places(others, outputs))
    run.engine.close()
    scale, tokens = ties.measured, given.requests * given.tokens
    assert scale is not None
    print(f"pair {run.pair.name}, {given.requests} requests of {given.tokens} tokens, bfloat16")
    print(
        f"mode off moves gaps by {scale.rms:.4f} nats rms (largest {scale.largest:.3f}, "
        f"{scale.positions} positions); allowance {scale.allowance:.3f} nats"
    )
    print(share("positions within the allowance", leading))
    print(share("changed tokens called a tie, an eighth masked", changed))
    broken = {verdict.place.request for verdict in changed if not verdict.is_tie}
    print(f"requests with a changed token that is no tie: {len(broken)} of {given.requests}")
    accepted = [verdict for verdict in changed if verdict.is_tie]
    print(f"the masked model's ties taken together: {together(accepted, tokens)}")
    flips = [v for v in leading if any(gap is not None and gap <= 0 for gap in v.gaps)]
    sound = sum(verdict.is_tie for verdict in flips)
    print(f"mode off's own flips between its shapes: {len(flips)}, of them ties {sound}")
    print(f"taken together: {together(flips, tokens)}")


class NudgedTieCheck(TieCheck):
    """The gate's tie check, for a cell that is mode off with attention moved by a rounding step."""

    def go_on(
        self, cell: Cell, prompts: Tokens, reference: Tokens, starts: Mapping[int, int]
    ) -> dict[int, tuple[int, ...]]:
        assert isinstance(self._engine, VllmEngine)
        with nudging(self._engine):
            return super().go_on(cell, prompts, reference, starts)


@contextmanager
def nudging(engine: VllmEngine) -> Iterator[None]:
    """Attention is moved by one rounding step while inside."""
    engine._rpc_all("nwor_nudge_attention", True)
    try:
        yield
    finally:
        engine._rpc_all("nwor_nudge_attention", False)


def nudged_set(run: OffEngine, prompts: Sequence[Sequence[int]]) -> str:
    """One set of prompts: its differences and its verdict."""
    run.engine.set_modes(run.off)
    reference = [output.token_ids for output in run.decode(prompts)]
    with nudging(run.engine):
        answers = [output.token_ids for output in run.decode(prompts)]
    ties = run.check(prompts, NudgedTieCheck)
    checked = check_tokens(run.off, prompts, answers, reference, ties, to_the_end=True)
    scale = ties.measured
    if scale is None:
        return "no token differs"
    gaps = sorted(v.gap for v in checked.verdicts if v.gap is not None)
    far = together_outside(gaps, scale, checked.tokens_compared)
    expected = scale.flips_from(0.0) * checked.tokens_compared
    return (
        f"{checked.comparison.parity if far is None else 'INVALID (together)'}: "
        f"{len(checked.verdicts)} differing tokens, largest gap {gaps[-1] if gaps else 0:.3f} of "
        f"{scale.allowance:.3f} nats, {expected:.1f} expected; scale {scale.rms:.4f}, largest "
        f"{scale.largest:.3f}"
    )


def nudged(given: argparse.Namespace) -> None:
    """Sets of prompts, each with its verdict."""
    run = OffEngine(given, sets=given.sets, eager=True)
    for number in range(len(run.prompts) // given.requests):
        first = number * given.requests
        chosen = run.prompts[first : first + given.requests]
        print(f"set {number + 1}: {nudged_set(run, chosen)}", flush=True)
    run.engine.close()


def errors(given: argparse.Namespace) -> None:
    """A line of CSV for each output position."""
    run = OffEngine(given)
    ties, outputs = run.check(run.prompts), run.decode(run.prompts, TOP)
    spots = spread([given.tokens] * given.requests, MAX_POSITIONS)
    prefixes = [(*run.prompts[r], *outputs[r].token_ids[:at]) for r, at in spots]
    shapes = ties._shapes(prefixes)
    moved = ties._next_tokens(prefixes, nudged=True)
    run.engine.close()
    sampled = {spot: tops for spot, *tops in zip(spots, moved, *shapes, strict=True)}
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measurements = {"masked": masked, "nudged": nudged, "errors": errors}
    parser.add_argument("what", choices=measurements)
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sets", type=int, default=8, help="of prompts, for nudged")
    parser.add_argument("--seed", type=int, default=1, help="of the masked places")
    given = parser.parse_args()
    measurements[given.what](given)


if __name__ == "__main__":
    main()
