"""Share of tokens that the tie rule accepts: sound, and with an eighth of the context masked.

    python sweeps/studies/tie-rule/measure.py [--pair smollm2] [--requests 8] [--tokens 64]

A vLLM engine of the pair in bfloat16 gives the reference text and checks ties, exactly as the gate
does (`nwor_bench.run.gate.ties`). Needs a GPU, or a CPU with fast bfloat16.

Printed: the share of output positions whose two likeliest tokens lie within the allowance; and of
the tokens that change when the model may not see an eighth of the context (behind its first token,
at a place drawn per request), how many it calls a tie, taken one by one. The gate as a
whole is stricter: one token that is no tie makes a cell INVALID, and so do ties that together lie
too far apart. Mode off's own flips between batch shapes must pass.
"""

import argparse
from random import Random

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


def masked_tokens(target: str, prompts: Texts, outputs: Texts, seed: int) -> Texts:
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


def changed_places(masked: Texts, outputs: Texts) -> list[Place]:
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
    masked = masked_tokens(pair.target, prompts, outputs, seed)
    leading = ties.check(prompts, outputs, leading_places(engine, prompts, outputs))
    changed = ties.check(prompts, outputs, changed_places(masked, outputs))
    engine.close()
    scale = ties.measured
    assert scale is not None
    print(f"pair {pair.name}, {requests} requests of {tokens} tokens, bfloat16")
    print(
        f"mode off moves gaps by {scale.rms:.4f} nats rms (largest {scale.largest:.3f}, "
        f"{scale.positions} positions); allowance {scale.allowance:.3f} nats"
    )
    print(share("positions within the allowance", leading))
    print(share("changed tokens called a tie, an eighth masked", changed))
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
