"""False alarms of the tie rule: mode off with its attention moved by one rounding step.

    python sweeps/studies/tie-rule/measure_sound_flips.py [--pair smollm2] [--sets 8] [--requests 8]
        [--tokens 40]

A second attention kernel that is as right as the first differs from it by about a rounding step.
Here every layer's attention returns values one rounding step up or down while mode off decodes
(`nwor_bench.plugin.observe.attention_nudge`), and the gate decides on the differing tokens as on a
staging cell's: behind each tie it goes on from the reference's token, to the end. Every set of
prompts that is called INVALID is a false alarm. Eagerly: replayed CUDA graphs hold attention as it
was captured. Needs a GPU, or a CPU with fast bfloat16.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nwor_bench.analysis.parity.ties import together_outside
from nwor_bench.analysis.parity.tokens import Tokens, check_tokens
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import TieCheck
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer


class NudgedTieCheck(TieCheck):
    """The gate's tie check, for a cell that is mode off with attention moved by a rounding step."""

    def __init__(self, engine: VllmEngine, off: Cell, prompts: Tokens, tokens: int):
        super().__init__(engine, off, lambda: prompts, tokens, ignore_eos=True)
        self._nudged = engine

    def go_on(
        self, cell: Cell, prompts: Tokens, reference: Tokens, starts: Mapping[int, int]
    ) -> dict[int, tuple[int, ...]]:
        with nudged(self._nudged):
            return super().go_on(cell, prompts, reference, starts)


@contextmanager
def nudged(engine: VllmEngine) -> Iterator[None]:
    """Attention is moved by one rounding step while inside."""
    engine._rpc_all("nwor_nudge_attention", True)
    try:
        yield
    finally:
        engine._rpc_all("nwor_nudge_attention", False)


def check_set(engine: VllmEngine, off: Cell, prompts: Tokens, tokens: int) -> str:
    """One set of prompts: its differences and its verdict."""
    engine.set_modes(off)
    lengths = [tokens] * len(prompts)
    reference = [o.token_ids for o in engine.decode_greedily(prompts, lengths, ignore_eos=True)]
    with nudged(engine):
        outputs = engine.decode_greedily(prompts, lengths, ignore_eos=True)
    ties = NudgedTieCheck(engine, off, prompts, tokens)
    answers = [output.token_ids for output in outputs]
    checked = check_tokens(off, prompts, answers, reference, ties, to_the_end=True)
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--sets", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    given = parser.parse_args()
    pair, scenario = resolve_pair(given.pair), load_scenario("short")
    amount = {"requests": given.requests, "max_new_tokens": given.tokens}
    eager = json.dumps({"enforce_eager": True})
    engine = VllmEngine(pair, resolve(scenario, **amount, dtype="bfloat16", engine_args=eager))
    texts = load_prompts(scenario)[: given.sets * given.requests]
    prompts = encode(texts, load_tokenizer(pair.target), 1024, given.tokens)
    off = Cell(pair.name, NworMode.OFF, ScvMode.OFF)
    for number in range(len(prompts) // given.requests):
        first = number * given.requests
        chosen = prompts[first : first + given.requests]
        print(f"set {number + 1}: {check_set(engine, off, chosen, given.tokens)}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
