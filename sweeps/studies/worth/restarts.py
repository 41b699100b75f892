r"""Do separate engines, each with a fixed number of drafts, give the ratios of `worth`?

    python sweeps/studies/worth/restarts.py --output DIR --worth DIR/worth.csv
    python sweeps/studies/worth/restarts.py --at-once --cache 6000000000 --requests 8 32 128 \
      --arms plain 0 1 2 3 0/4 1/4 2/4 --output DIR --worth DIR/worth.csv
    VLLM_USE_V2_MODEL_RUNNER=0 python sweeps/studies/worth/restarts.py --pair smollm2 --rates "" \
      --dtype float32 --requests 1 2 4 8 --arms 0 1 2 --tokens 64 --eager --cache 1000000000 \
      --worth worth.csv --output DIR  # no GPU

Each arm is a process with stock vLLM: `plain` has no drafter, `0` has one and drafts nothing
(vLLM's own schedule with k = 0), the others draft 1, 2, ... tokens; `1/4` drafts 1 token in an
engine for 4, whose schedule names 0 to 4, as that of `worth` does. No plugin runs.

Arms run one after another. With --at-once all engines start together and stay up, and their
batches are interleaved: every repetition runs all arms in random order, with the same prompts. Then
ratios are those within repetitions, and a host whose speed drifts distorts none of them. --cache is
each engine's. An arm that fails is left out from there on; its error is in arm-NAME.log.

Prompts, lengths, acceptance and CUDA graphs are those of

    nwor-bench worth --pair llama-3b-shape --acceptance-rates 0.75,0.56,0.42,0.32 \
      --requests 1,8,32,128 --max-new-tokens 192

The time of a window is that of all windows in which the whole batch decodes, without prefills and
without the end at which few requests run. `worth` compares with k = 0 in an engine that has a
drafter, so `0` is what its ratios are compared with; `plain` is shown beside it.
Writes restarts.csv (a row a batch, after every repetition), schedule_cost.csv (the time of a window
of `K/N` over that of `K`) and, with --worth, agreement.csv. --compare-only reads restarts.csv of a
run that was stopped; write --at-once too if that run had it. Intervals need 10 repetitions.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from agreement import PLAIN, agreement, drafts_of, schedule_cost

from nwor_bench.models.pairs import resolve_pair

RATES = [0.75, 0.56, 0.42, 0.32]
SETTLING = 3
"""Windows behind the last prefill that do not count."""


def speculation(
    pair: Any, arm: str, rates: list[float], largest: int, measured: Collection[int] = ()
) -> dict[str, Any] | None:
    """vLLM's speculative configuration of an arm."""
    if arm == PLAIN:
        return None
    _, _, most = arm.partition("/")
    k = drafts_of(arm)
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
        free = (size for size in count(1) if size not in measured)
        others = dict(zip(free, (n for n in range(drafts + 1) if n != k), strict=False))
        end = max(others) + 1
        named = [[size, size, others.get(size, k)] for size in range(1, end)]
        config["num_speculative_tokens_per_batch_size"] = [*named, [end, largest, k]]
    return config


def most_requests(requests: list[int], arms: list[str]) -> int:
    """`max_num_seqs` of every arm: room for the largest batch, and for all sizes of a schedule."""
    named = [int(arm.partition("/")[2]) for arm in arms if "/" in arm]
    return max(*requests, max(named) + len(requests) + 1) if named else max(requests)


def engine_of(arguments: argparse.Namespace) -> Any:
    """Stock vLLM in this process."""
    from vllm import LLM

    pair, requests = resolve_pair(arguments.pair), arguments.requests
    largest = most_requests(requests, arguments.arms)
    graphs = {} if arguments.eager else {"cudagraph_mode": "FULL_DECODE_ONLY"}
    more = dict(arguments.engine_args)
    graphs |= more.pop("compilation_config", {})
    return LLM(
        model=pair.target,
        dtype=arguments.dtype or pair.dtype,
        **({"load_format": pair.load_format} if pair.load_format else {}),
        max_model_len=1024,
        max_num_seqs=largest,
        kv_cache_memory_bytes=arguments.cache,  # vLLM only checks that the share below is free
        **({"gpu_memory_utilization": 0.9 / len(arguments.arms)} if arguments.at_once else {}),
        speculative_config=speculation(pair, arguments.arm, arguments.rates, largest, requests),
        disable_log_stats=not arguments.log_stats,
        enforce_eager=arguments.eager,
        compilation_config=graphs,
        **more,
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


def serve(arguments: argparse.Namespace) -> None:
    """One arm's engine in this process: a batch for each line on stdin, answered on the pipe."""

    def answer(found: dict[str, float]) -> None:
        os.write(arguments.answers, json.dumps(found).encode() + b"\n")

    os.set_inheritable(arguments.answers, False)
    try:
        began = time.perf_counter()
        engine = engine_of(arguments)
        start_s = time.perf_counter() - began
        texts = prompts_of(arguments.pair, arguments.tokens)
        answer({"start_s": start_s})
        for line in sys.stdin:
            size, number = json.loads(line)
            first = (number + arguments.warmup) * size
            own = list(islice(cycle(texts), first, first + size))
            found = decode(engine, f"{size}-{number}", own, arguments.tokens)
            answer({**found, "start_s": start_s})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Worker:
    """The process of one arm. Between batches it blocks in a read of its stdin."""

    def __init__(self, arm: str, output: Path):
        self.arm = arm
        self.seconds = 0.0
        """From launch to the last answer or the end."""
        self._began = time.perf_counter()
        self._log = output / f"arm-{arm.replace('/', 'of')}.log"
        ours, theirs = os.pipe()
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm, "--answers", str(theirs)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                pass_fds=[theirs],
                start_new_session=True,  # so that `end` reaches what it starts
            )
        os.close(theirs)
        self._answers = os.fdopen(ours)

    def run(self, size: int, number: int) -> dict[str, float] | None:
        """One batch; None if the worker has failed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([size, number]).encode() + b"\n")
        return self.answer()

    def answer(self) -> dict[str, float] | None:
        """The next answer; the first says that it has started. None if it failed: it is ended."""
        line = self._answers.readline()
        self.seconds = time.perf_counter() - self._began
        if line:
            return dict(json.loads(line))
        code = self.end()
        said = f"{self.arm}: failed with {code} after {self.seconds:.0f} s, see {self._log}"
        print(said, flush=True)
        return None

    def end(self) -> int:
        """Kill it and what it started. Its exit code."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._answers.close()
            self.seconds = time.perf_counter() - self._began
        return self._process.returncode


def turns(arguments: argparse.Namespace) -> Iterator[tuple[int, int, list[str]]]:
    """Batch size, repetition (negative: warm-up) and the order of the arms in it."""
    draw = np.random.default_rng(0)
    for size in arguments.requests:
        for number in range(-arguments.warmup, arguments.repetitions):
            yield size, number, [str(arm) for arm in draw.permutation(arguments.arms)]


def measure(arguments: argparse.Namespace) -> pd.DataFrame:
    """All batches of all arms, one arm after another or all at once."""
    arms, workers, rows = arguments.arms, dict[str, Worker](), list[dict[str, Any]]()

    def stored() -> pd.DataFrame:
        table = pd.DataFrame(rows)
        if rows:
            table["process_s"] = [workers[arm].seconds for arm in table.arm]
            table.to_csv(arguments.output / "restarts.part", index=False)
            (arguments.output / "restarts.part").replace(arguments.output / "restarts.csv")
        return table

    try:
        for group in [arms] if arguments.at_once else [[arm] for arm in arms]:
            for arm in group:
                workers[arm] = Worker(arm, arguments.output)
            running = [arm for arm in group if workers[arm].answer() is not None]
            for size, number, order in turns(arguments):
                for arm in filter(running.__contains__, order):
                    found = workers[arm].run(size, number)
                    if found is None:
                        running.remove(arm)
                    elif number >= 0:
                        rows.append({"arm": arm, "requests": size, "repetition": number, **found})
                if number >= 0:
                    stored()
            for arm in running:
                workers[arm].end()
                print(f"{arm}: {workers[arm].seconds:.0f} s", flush=True)
    finally:
        for worker in workers.values():
            worker.end()
        table = stored()
    return table


def stop(*_: object) -> None:
    """On SIGTERM: raise once, so that `measure` ends its workers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def compare(rows: pd.DataFrame, arguments: argparse.Namespace) -> None:
    """Print and write what the batches say."""
    seconds = rows.groupby("arm").process_s.first()
    total = seconds.max() if arguments.at_once else seconds.sum()
    print(f"{total:.0f} s in all processes")
    cost = schedule_cost(rows, arguments.at_once)
    if cost.empty:
        print("no arm K/N with 10 repetitions beside its fixed K: no schedule_cost.csv")
    else:
        cost.to_csv(arguments.output / "schedule_cost.csv", index=False, float_format="%.4f")
        print("What a schedule of several counts costs: time of a window over that of the fixed k")
        print(cost.round(3).to_string(index=False))
    if arguments.worth is not None:
        found = agreement(rows, arguments.worth, arguments.rates, arguments.at_once)
        found.to_csv(arguments.output / "agreement.csv", index=False, float_format="%.4f")
        print(found.round(3).to_string(index=False))
        print(f"{sum(found.get('agrees', []))} of {len(found)} agree")


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
    parser.add_argument("--cache", type=int, default=20_000_000_000, help="bytes of an engine's KV")
    parser.add_argument("--dtype", help="default: the pair's")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="vLLM's, as JSON")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--log-stats", action="store_true", help="count as a server does")
    parser.add_argument("--at-once", action="store_true", help="all engines stay up, interleaved")
    parser.add_argument("--worth", type=pd.read_csv, help="worth.csv to compare with")
    parser.add_argument("--compare-only", action="store_true", help="restarts.csv is there already")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.arms = list(dict.fromkeys(arguments.arms))
    if arguments.arm is not None:
        return serve(arguments)
    signal.signal(signal.SIGTERM, stop)
    if arguments.at_once:  # Intel's OpenMP spins for 200 ms after a batch; vLLM's servers set 5 too
        os.environ.setdefault("KMP_BLOCKTIME", "5")
    arguments.output.mkdir(parents=True, exist_ok=True)
    stored = arguments.output / "restarts.csv"
    rows = pd.read_csv(stored, dtype={"arm": str}) if arguments.compare_only else measure(arguments)
    if rows.empty:
        sys.exit(f"no arm ran a batch; errors are in {arguments.output}/arm-*.log")
    return compare(rows, arguments)


def rates_of(text: str) -> list[float]:
    """`0.75,0.56`."""
    return [float(word) for word in text.split(",") if word]


if __name__ == "__main__":
    main()
