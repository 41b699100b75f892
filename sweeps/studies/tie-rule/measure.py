"""Share of tokens that the tie rule accepts: sound, and with an eighth of the context masked.

    python sweeps/studies/tie-rule/measure.py [--pair smollm2] [--requests 8] [--tokens 64]

A vLLM engine of the pair in bfloat16 gives the reference text and checks ties, exactly as the gate
does (`nwor_bench.run.gate.ties`). The former rule is shown beside it: twice the largest bfloat16
error over the whole vocabulary, by transformers. Needs a GPU, or a CPU with fast bfloat16.

Printed: the share of output positions whose two likeliest tokens lie within the allowance; and of
the tokens that change when the model may not see an eighth of the context (behind its first token,
at a place drawn per request), how many each rule calls a tie, taken one by one. The gate as a
whole is stricter: one token that is no tie makes a cell INVALID, and so do ties that together lie
too far apart. Mode off's own flips between batch shapes must pass.
"""

import argparse
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from nwor_bench.analysis.parity.ties import Place, PlaceVerdict, leading_two, together_outside
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.preflight import TOP
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import TieCheck
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer

Texts = list[list[int]]


@dataclass(frozen=True)
class Rows:
    """One request's output positions by transformers: logits [output tokens, vocabulary]."""

    exact: torch.Tensor
    rough: torch.Tensor
    masked: torch.Tensor
    """bfloat16, without an eighth of the context."""

    def was_within(self, at: int, token: int, other: int) -> bool:
        """The rule before: float32 gap against twice the largest error."""
        error = float((self.rough[at] - self.exact[at]).abs().max())
        return abs(float(self.exact[at, token] - self.exact[at, other])) <= 2 * error


def rows_of(target: str, prompts: Texts, outputs: Texts, seed: int) -> list[Rows]:
    """Three forward passes a request, over prompt and output."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact, rough = (
        AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    found = []
    for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = torch.tensor([[*prompt, *output[:-1]]], device=device)
        seen = torch.ones_like(ids)
        hidden = max(1, len(prompt) // 8)
        start = Random(f"{seed}:{request}").randrange(1, max(2, len(prompt) - hidden))
        seen[0, start : start + hidden] = 0

        def logits(model: Any, mask: torch.Tensor, ids: Any = ids, n: int = len(prompt)) -> Any:
            with torch.no_grad():
                return model(ids, attention_mask=mask).logits[0, n - 1 :].float().cpu()

        whole = torch.ones_like(ids)
        found.append(Rows(logits(exact, whole), logits(rough, whole), logits(rough, seen)))
    return found


def leading_places(engine: VllmEngine, prompts: Texts, outputs: Texts) -> list[Place]:
    """The likeliest and the second likeliest token of every output position."""
    prefixes = [
        [*prompt, *output[:at]]
        for prompt, output in zip(prompts, outputs, strict=True)
        for at in range(len(output))
    ]
    where = [(r, at) for r, output in enumerate(outputs) for at in range(len(output))]
    tops = engine.decode_greedily(prefixes, [1] * len(prefixes), ignore_eos=True, top=TOP)
    places = []
    for (request, at), output in zip(where, tops, strict=True):
        two = leading_two(output.top[0])
        assert two is not None
        places.append(Place(request, at, *two))
    return places


def changed_places(rows: list[Rows], outputs: Texts) -> list[Place]:
    """Places where the masked model, after the reference's tokens, predicts another token."""
    return [
        Place(request, at, output[at], int(row.masked[at].argmax()))
        for request, (row, output) in enumerate(zip(rows, outputs, strict=True))
        for at in range(len(output))
        if int(row.masked[at].argmax()) != output[at]
    ]


def share(name: str, found: list[PlaceVerdict], rows: list[Rows]) -> str:
    """Places that each rule calls a tie, and requests with one that is none."""
    ours = sum(verdict.is_tie for verdict in found)
    old = sum(
        rows[p.request].was_within(p.position, p.reference, p.token)
        for p in (verdict.place for verdict in found)
    )
    total = len(found)
    return f"{name}: {ours} of {total} ({ours / total:.1%}); rule before: {old} ({old / total:.1%})"


def together(ties: list[PlaceVerdict], tokens: int) -> str:
    """The gate's verdict on all ties of so many tokens together."""
    gaps = [verdict.gap or 0.0 for verdict in ties]
    return (ties and together_outside(gaps, ties[0].scale, tokens)) or "sound"


def report(pair_name: str, requests: int, tokens: int, seed: int) -> None:
    """Start the engine, check ties, print."""
    pair = resolve_pair(pair_name)
    scenario = load_scenario("short")
    overrides = {
        "requests": requests,
        "max_new_tokens": tokens,
        "max_model_len": 1024,
        "seed": seed,
    }
    spec = resolve(scenario, **overrides, dtype="bfloat16")
    texts = load_prompts(scenario)[:requests]
    prompts = encode(texts, load_tokenizer(pair.target), 1024, tokens)
    off = Cell(pair.name, NworMode.OFF, ScvMode.OFF)
    engine = VllmEngine(pair, spec)
    engine.set_modes(off)
    texts_out = engine.decode_greedily(prompts, [tokens] * requests, ignore_eos=True)
    outputs = [list(output.token_ids) for output in texts_out]
    ties = TieCheck(engine, off, lambda: prompts, tokens, ignore_eos=True)
    rows = rows_of(pair.target, prompts, outputs, seed)
    leading = ties.check(prompts, outputs, leading_places(engine, prompts, outputs))
    changed = ties.check(prompts, outputs, changed_places(rows, outputs))
    engine.close()
    scale = ties.measured
    assert scale is not None
    print(f"pair {pair.name}, {requests} requests of {tokens} tokens, bfloat16")
    print(
        f"mode off moves gaps by {scale.rms:.4f} nats rms (largest {scale.largest:.3f}, "
        f"{scale.positions} positions); allowance {scale.allowance:.3f} nats"
    )
    print(share("positions within the allowance", leading, rows))
    print(share("changed tokens called a tie, an eighth masked", changed, rows))
    broken = {verdict.place.request for verdict in changed if not verdict.is_tie}
    print(f"requests with a changed token that is no tie: {len(broken)} of {requests}")
    ties = [verdict for verdict in changed if verdict.is_tie]
    print(f"the masked model's ties taken together: {together(ties, requests * tokens)}")
    flips = [v for v in leading if any(gap is not None and gap <= 0 for gap in v.gaps)]
    sound = sum(verdict.is_tie for verdict in flips)
    print(f"mode off's own flips between its shapes: {len(flips)}, of them ties {sound}")
    print(f"taken together: {together(flips, requests * tokens)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    report(given.pair, given.requests, given.tokens, given.seed)


if __name__ == "__main__":
    main()
