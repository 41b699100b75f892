r"""What does it cost a server to watch draft counts? Windows at one k, watched and stock.

    python sweeps/studies/worth/watching.py --output DIR
    python sweeps/studies/worth/watching.py --pair tiny --rates "" --requests 1 4 --tokens 48 \
      --eager --cache 200000000 --output DIR        # without a GPU

One engine with VLLM_NWOR_DRAFTS=interleave, whose order asks for --drafts in every step: a server
also spends windows at other k, but that is what it was asked for. `watched` has the order, the
hooks, the device's clock and the thread that computes estimates; `stock` has none of them, and
vLLM's own scheduler. Batches of both alternate in random order, with the same prompts. Writes
watching.csv, a row a batch, and prints the ratio of a window's time with its 95 % interval.
"""

import argparse
import os
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from restarts import RATES, decode, prompts_of, rates_of, speculation

from nwor_bench.models.pairs import resolve_pair
from nwor_bench.stats.robust import robust_location

ARMS = ("watched", "stock")


def engine_of(arguments: argparse.Namespace) -> Any:
    """vLLM as `VLLM_NWOR_DRAFTS=interleave` starts it, in this process."""
    from vllm import LLM

    pair = resolve_pair(arguments.pair)
    largest = max(*arguments.requests, arguments.drafts + 1)
    return LLM(
        model=pair.target,
        dtype=pair.dtype,
        **({"load_format": pair.load_format} if pair.load_format else {}),
        max_model_len=1024,
        max_num_seqs=largest,
        kv_cache_memory_bytes=arguments.cache,
        speculative_config=speculation(pair, str(arguments.drafts), arguments.rates, largest),
        enforce_eager=arguments.eager,
    ).llm_engine


class Watch:
    """Switches watching on and off between batches."""

    def __init__(self, engine: Any, drafts: int):
        from nwor_bench.plugin.attaching import HOOK

        worker = engine.model_executor.driver_worker
        self._hook = getattr(getattr(worker, "worker", worker), HOOK)
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._turns = self._scheduler.schedule.__self__
        owners = (getattr(f, "__self__", None) for f in self._hook.accumulator.listeners)
        self.groups = next(own._groups for own in owners if hasattr(own, "_groups"))
        counts = (drafts,) * len(self._turns._counts)
        self._turns._counts = self.groups._counts = counts
        self._turns._spans = cycle([drafts])
        self._turns._set(drafts)
        self._counting: Any = None

    def switch(self, arm: str) -> None:
        """Watch, or run stock's code only."""
        runner, is_on = self._hook.runner, self._hook.attached
        if arm == "stock" and is_on:
            self._hook.drain(None)
            self._hook.detach()
            self._counting = vars(runner).pop("execute_model")
            self._scheduler.schedule = self._turns._original
        elif arm == "watched" and not is_on:
            runner.execute_model = self._counting
            self._hook.attach()
            self._scheduler.schedule = self._turns._schedule


def main() -> None:
    """Measure both arms at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pair", default="llama-3b-shape")
    parser.add_argument("--rates", type=rates_of, default=RATES)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=192, help="to generate")
    parser.add_argument("--blocks", type=int, default=20, help="10 or more")
    parser.add_argument("--cache", type=int, default=20_000_000_000, help="bytes of KV cache")
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ |= {"VLLM_NWOR_DRAFTS": "interleave", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engine = engine_of(arguments)
    watch, texts = Watch(engine, arguments.drafts), prompts_of(arguments.pair, arguments.tokens)
    rows: list[dict[str, Any]] = []
    for size in arguments.requests:
        logs = []
        for block in range(-1, arguments.blocks):
            prompts = [texts[(block * size + n) % len(texts)] for n in range(size)]
            times = {}
            for arm in random.Random(f"{size}:{block}").sample(ARMS, 2):
                watch.switch(arm)
                found = decode(engine, f"{size}-{block}-{arm}", prompts, arguments.tokens)
                times[arm] = found["seconds"] / found["windows"]
                rows.append({"requests": size, "block": block, "arm": arm, **found})
            if block >= 0:  # the first one warms up
                logs.append(float(np.log(times["watched"] / times["stock"])))
        pd.DataFrame(rows).to_csv(arguments.output / "watching.csv", index=False)
        located = robust_location(logs)
        assert located is not None
        ratio, groups = located.exp(), sum(watch.groups.groups.values()) // 2
        said = f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
        print(f"{size} requests: watched / stock {said}, {groups} groups so far", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
