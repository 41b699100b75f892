r"""Do separate engines, each with a fixed number of drafts, give the ratios of `worth`?

    python sweeps/studies/worth/restarts.py --output DIR --worth DIR/worth.csv
    VLLM_USE_V2_MODEL_RUNNER=0 python sweeps/studies/worth/restarts.py --pair smollm2 --rates "" \
      --dtype float32 --requests 1 2 4 8 --arms 0 1 2 --tokens 64 --eager --cache 1000000000 \
      --worth worth.csv --output DIR  # no GPU

One process after another, each with stock vLLM: `plain` has no drafter, `0` has one and drafts
nothing (vLLM's own schedule with k = 0), the others draft 1, 2, ... tokens; `1/4` drafts 1 token in
an engine for 4, whose schedule names 0 to 4, as that of `worth` does. No plugin runs.
Prompts, lengths, acceptance and CUDA graphs are those of

    nwor-bench worth --pair llama-3b-shape --acceptance-rates 0.75,0.56,0.42,0.32 \
      --requests 1,8,32,128 --max-new-tokens 192

The time of a window is that of all windows in which the whole batch decodes, without prefills and
without the end at which few requests run. `worth` compares with k = 0 in an engine that has a
drafter, so `0` is what its ratios are compared with; `plain` is shown beside it.
Writes restarts.csv (a row a batch) and, with --worth, agreement.csv.
"""

import argparse
import os
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nwor_bench.analysis.statistics import unpaired_ratio
from nwor_bench.instruments.robust import RatioInterval, as_ratio, robust_location
from nwor_bench.models.pairs import resolve_pair

PLAIN = "plain"
RATES = [0.75, 0.56, 0.42, 0.32]
SETTLING = 3
"""Windows behind the last prefill that do not count."""


def speculation(pair: Any, arm: str, rates: list[float], largest: int) -> dict[str, Any] | None:
    """vLLM's speculative configuration of an arm."""
    if arm == PLAIN:
        return None
    k, _, most = arm.partition("/")
    drafts = max(int(most or k), 1)
    config: dict[str, Any] = {"method": pair.method, "num_speculative_tokens": drafts}
    if pair.draft:
        config["model"] = pair.draft
    if rates:
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_rates"] = rates[:drafts]
    if arm == "0":
        config["num_speculative_tokens_per_batch_size"] = [[1, largest, 0]]
    elif most:  # sizes that are not measured name the other counts
        others = [n for n in range(drafts + 1) if n != int(k)]
        named = [[size, size, n] for size, n in enumerate(others, start=1)]
        config["num_speculative_tokens_per_batch_size"] = [*named, [drafts + 1, largest, int(k)]]
    return config


def engine_of(arguments: argparse.Namespace) -> Any:
    """Stock vLLM in this process."""
    from vllm import LLM

    pair, largest = resolve_pair(arguments.pair), max(arguments.requests)
    return LLM(
        model=pair.target,
        dtype=arguments.dtype or pair.dtype,
        **({"load_format": pair.load_format} if pair.load_format else {}),
        max_model_len=1024,
        max_num_seqs=largest,
        kv_cache_memory_bytes=arguments.cache,
        speculative_config=speculation(pair, arguments.arm, arguments.rates, largest),
        disable_log_stats=not arguments.log_stats,
        enforce_eager=arguments.eager,
        compilation_config={} if arguments.eager else {"cudagraph_mode": "FULL_DECODE_ONLY"},
    ).llm_engine


def prompts_of(pair: str, tokens: int) -> list[list[int]]:
    """The prompts of the scenario `short`."""
    from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer
    from nwor_bench.workload.scenario import load_scenario

    texts = load_prompts(load_scenario("short"))
    return encode(texts, load_tokenizer(resolve_pair(pair).target), 1024, tokens)


def decode(engine: Any, name: str, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """One batch: windows in which every request decodes, their tokens and seconds."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, params)
    seen: dict[str, int] = {}
    points: list[tuple[float, int]] = []
    is_whole = True
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        seen |= {each.request_id: len(each.outputs[0].token_ids) for each in outputs}
        is_whole &= not any(each.finished for each in outputs)
        if outputs and is_whole and len(seen) == len(prompts):
            points.append((now, sum(seen.values())))
    (began, before), (ended, after) = points[SETTLING], points[-1]
    windows = len(points) - 1 - SETTLING
    return {"windows": windows, "tokens": after - before, "seconds": ended - began}


def measure_arm(arguments: argparse.Namespace) -> None:
    """All batch sizes in this process; the rows go to a file of the arm's own."""
    began = time.perf_counter()
    engine = engine_of(arguments)
    start_s = time.perf_counter() - began
    texts, rows = prompts_of(arguments.pair, arguments.tokens), []
    for size in arguments.requests:
        for number in range(-arguments.warmup, arguments.repetitions):
            first = (number + arguments.warmup) * size
            own = list(islice(cycle(texts), first, first + size))
            found = decode(engine, f"{size}-{number}", own, arguments.tokens)
            if number >= 0:
                rows.append({"arm": arguments.arm, "requests": size, "repetition": number, **found,
                             "start_s": start_s})  # fmt: skip
    pd.DataFrame(rows).to_csv(arguments.output / f"arm-{file_name(arguments.arm)}.csv", index=False)
    os._exit(0)


def measure(arguments: argparse.Namespace) -> pd.DataFrame:
    """Every arm, one process after the other. An arm that fails is left out."""
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = []
    for arm in arguments.arms:
        began = time.perf_counter()
        with (arguments.output / f"arm-{file_name(arm)}.log").open("wb") as log:
            command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
            code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
        seconds = time.perf_counter() - began
        print(f"{arm}: {seconds:.0f} s{f', failed with {code}' if code else ''}", flush=True)
        if not code:
            rows = pd.read_csv(arguments.output / f"arm-{file_name(arm)}.csv", dtype={"arm": str})
            found.append(rows.assign(process_s=seconds))
            pd.concat(found).to_csv(arguments.output / "restarts.csv", index=False)
    return pd.concat(found)


def file_name(arm: str) -> str:
    """`1of4` for `1/4`."""
    return arm.replace("/", "of")


def agreement(rows: pd.DataFrame, worth: pd.DataFrame, rates: list[float]) -> pd.DataFrame:
    """Tokens/s over k = 0 by `worth` and by the restarts, at each batch size and k > 0.

    They agree if they differ by no more than both intervals together. Settings of arms that did not
    run are left out.
    """

    def of(size: int, arm: str) -> RatioInterval:
        own = rows[(rows.requests == size) & (rows.arm == arm)]
        k = 0 if arm == PLAIN else int(arm.partition("/")[0])
        tokens = 1 + sum(rates[:k]) if rates else own.tokens.sum() / own.windows.sum() / size
        speeds = np.log(tokens * own.windows / own.seconds)
        located = robust_location(list(speeds))
        assert located is not None
        return as_ratio(located)

    found = []
    for said in worth[worth.drafts > 0].dropna(subset="ratio").itertuples():
        size, k = int(said.requests), int(said.drafts)
        if not ((rows.requests == size) & (rows.arm == str(k))).any():
            continue
        own = unpaired_ratio(of(size, str(k)), of(size, "0"))
        plain = unpaired_ratio(of(size, str(k)), of(size, PLAIN))
        assert own is not None
        assert plain is not None
        apart = abs(np.log(own.ratio / said.ratio))
        allowed = (np.log(own.high / own.low) + np.log(said.high / said.low)) / 2
        found.append({
            "requests": size, "drafts": k, "worth": said.ratio, "worth_low": said.low,
            "worth_high": said.high, "restarts": own.ratio, "restarts_low": own.low,
            "restarts_high": own.high, "agrees": bool(apart <= allowed),
            "over_plain": plain.ratio, "plain_low": plain.low, "plain_high": plain.high,
        })  # fmt: skip
    return pd.DataFrame(found)


def main() -> None:
    """Measure, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pair", default="llama-3b-shape")
    parser.add_argument("--rates", type=rates_of, default=RATES, help="0.75,0.56")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--arms", nargs="+", default=[PLAIN, *"01234"])
    parser.add_argument("--tokens", type=int, default=192, help="to generate")
    parser.add_argument("--repetitions", type=int, default=10, help="10 or more")
    parser.add_argument("--warmup", type=int, default=1, help="batches of each size before them")
    parser.add_argument("--cache", type=int, default=20_000_000_000, help="bytes of KV cache")
    parser.add_argument("--dtype", help="default: the pair's")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--log-stats", action="store_true", help="count as a server does")
    parser.add_argument("--worth", type=Path, help="worth.csv to compare with")
    parser.add_argument("--compare-only", action="store_true", help="restarts.csv is there already")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm is not None:
        return measure_arm(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    stored = arguments.output / "restarts.csv"
    rows = pd.read_csv(stored, dtype={"arm": str}) if arguments.compare_only else measure(arguments)
    print(f"{rows.groupby('arm').process_s.first().sum():.0f} s in all processes")
    if arguments.worth is not None:
        found = agreement(rows, pd.read_csv(arguments.worth), arguments.rates)
        found.to_csv(arguments.output / "agreement.csv", index=False, float_format="%.4f")
        print(found.round(3).to_string(index=False))
        print(f"{found.agrees.sum()} of {len(found)} agree")
    return None


def rates_of(text: str) -> list[float]:
    """`0.75,0.56`."""
    return [float(word) for word in text.split(",") if word]


if __name__ == "__main__":
    main()
