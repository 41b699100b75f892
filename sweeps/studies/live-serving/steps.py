r"""Which steps of a server take longer with staging? Every step of one engine, timed.

    python sweeps/studies/live-serving/steps.py --output DIR
    VLLM_USE_V2_MODEL_RUNNER=0 python sweeps/studies/live-serving/steps.py --pair tiny --rates 8 \
      --most 4 --input 64 --tokens 64 --output DIR \
      --flags '{"kv_cache_memory_bytes": 200000000, "enforce_eager": true}'        # without a GPU

Requests arrive as at a server (Poisson). The mode changes every few seconds, in a new random order
for each block: stock (no hooks), off, stage (drafts beside a prefill are written directly), beside
(they are staged) and interleave. In a block every mode begins with an empty engine and serves the
same arrivals; prompts are new each time, so that no prefix is cached. A step lasts until the next
one begins. Writes steps.csv: medians by rate, block, mode and kind of step, and of the time per
token of requests that began and ended in the block. With VLLM_NWOR_METRICS=1 windows are counted as
in a server.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import NworMode, ScvMode

MODES = ("stock", "off", "stage", "beside", "interleave")
SETTLING_S = 1.0
DRAFTS = 4
COLUMNS = ("rate", "block", "mode", "began", "tokens", "requests", "drafting", "alone", "host_ms")
GRAPHS = {
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 25_000_000_000,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [5, 10, 20, 40, 80, 160, 320],
    },
}


class Load:
    """Requests that keep arriving at an engine in this process."""

    def __init__(self, engine: Any, arguments: argparse.Namespace):
        self._engine = engine
        self._arguments = arguments
        self._draw = random.Random(1)
        self._arrivals = random.Random(1)
        self._number = 0
        self._first: dict[str, tuple[float, int]] = {}
        self.tpot_ms: list[float] = []
        """Time per token of each request that began and ended in the last `run`."""

    def begin(self, block: int) -> None:
        """Finish what is under way; arrivals of one block are the same whenever it begins."""
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._arrivals = random.Random(block)

    def run(self, rate: float, seconds: float) -> None:
        """Let requests arrive and the engine work for so long."""
        now = arrives = time.perf_counter()
        end = now + seconds
        self.tpot_ms, self._first, oldest = [], {}, self._number
        while now < end:
            while arrives <= now:
                self._add()
                arrives += self._arrivals.expovariate(rate)
            if self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                self._time([each for each in outputs if int(each.request_id) >= oldest])
            now = time.perf_counter()

    def _time(self, outputs: list[Any]) -> None:
        now = time.perf_counter()
        for output in outputs:
            tokens = len(output.outputs[0].token_ids)
            began, before = self._first.setdefault(output.request_id, (now, tokens))
            if output.finished and tokens > before:
                self.tpot_ms.append(1e3 * (now - began) / (tokens - before))

    def _add(self) -> None:
        from vllm import SamplingParams

        tokens = [self._draw.randrange(5, 60) for _ in range(self._arguments.input)]
        params = SamplingParams(
            temperature=0, max_tokens=self._arguments.tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._number), {"prompt_token_ids": tokens}, params)
        self._number += 1


class Steps:
    """Notes every step of a worker, with the place that was set last."""

    def __init__(self, worker: Any):
        self.rows: list[list[Any]] = []
        self.place: tuple[float, int, str] | None = None
        worker.execute_model = self._noted(worker.execute_model)

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            from nwor_bench.records.window_order import only_verifies

            began = time.perf_counter()
            output = original(scheduled, *args, **kwargs)
            host_ms = (time.perf_counter() - began) * 1e3
            tokens, drafts = (
                scheduled.total_num_scheduled_tokens,
                scheduled.scheduled_spec_decode_tokens,
            )
            alone = only_verifies(scheduled)
            requests = len(scheduled.num_scheduled_tokens)
            place = self.place or (0.0, -1, "")
            self.rows.append([*place, began, tokens, requests, len(drafts), alone, host_ms])
            return output

        return execute_model

    def table(self, requests: list[dict[str, Any]]) -> pd.DataFrame:
        """Medians; only steps that another one of the same block follows, and `requests`."""
        rows = pd.DataFrame(self.rows, columns=list(COLUMNS))
        rows["ms"] = -rows.began.diff(-1) * 1e3
        followed = (rows["mode"] == rows["mode"].shift(-1)) & (rows.tokens.shift(-1) > 0)
        rows = rows[followed & (rows.block >= 0) & (rows.drafting > 0)]
        rows["kind"] = rows.alone.map({True: "windows", False: "with a prefill"})
        steps = (
            rows.groupby(["rate", "block", "mode", "kind"])
            .agg(
                steps=("ms", "size"),
                requests=("requests", "mean"),
                tokens=("tokens", "mean"),
                ms=("ms", "median"),
                host_ms=("host_ms", "median"),
            )
            .reset_index()
        )
        return pd.concat([steps, pd.DataFrame(requests)], ignore_index=True)


def summary(table: pd.DataFrame) -> str:
    """Each mode's median of the blocks, and of its ratio to stock in the same block."""
    rows = table.pivot_table(index=["kind", "rate", "block"], columns="mode", values="ms")
    ratios = rows.div(rows["stock"], axis=0).add_suffix(" / stock")
    middle = pd.concat([rows, ratios], axis=1).groupby(["kind", "rate"]).median()
    return f"{middle.round(4).T}\n{rows.groupby(['kind', 'rate']).size()}"


def switch(hook: Any, mode: str, scv: ScvMode) -> None:
    """Change the hook's mode between two steps."""
    from nwor_bench.plugin.interleaving import LiveModes

    hook.drain(None)
    hook.interleave(None)
    if hook.attached:
        hook.set_modes(NworMode.OFF, ScvMode.OFF)
    if mode == "stock":
        hook.detach()
        return
    if not hook.attached:
        hook.attach()
    hook._stages_beside_prefill = mode == "beside"  # a server's is fixed when it starts
    if mode == "interleave":
        LiveModes(hook, scv).start()
    elif mode != "off":
        hook.set_modes(NworMode.STAGE, scv)


def engine_of(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """vLLM's engine and its worker, both in this process."""
    from vllm import LLM

    pair = resolve_pair(arguments.pair)
    llm = LLM(
        model=pair.target,
        dtype=pair.dtype,
        max_model_len=2048,
        max_num_seqs=arguments.most,
        speculative_config=pair.speculative_config(DRAFTS),
        **({"load_format": pair.load_format} if pair.load_format else {}),
        worker_extension_cls="nwor_bench.plugin.worker.NworWorkerExtension",
        **(json.loads(arguments.flags) if arguments.flags else GRAPHS),
    )
    worker = llm.llm_engine.model_executor.driver_worker
    return llm.llm_engine, getattr(worker, "worker", worker)


def main() -> None:
    """Measure every rate and mode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pair", default="llama-3b-shape")
    parser.add_argument("--rates", type=float, nargs="+", default=[38.0, 66.0], help="requests/s")
    parser.add_argument("--seconds", type=float, default=2, help="of each mode in a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="to generate")
    parser.add_argument("--most", type=int, default=64, help="requests at once")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--scv", type=ScvMode, choices=ScvMode, default=ScvMode.ADAPTIVE)
    parser.add_argument("--flags", help="engine arguments as JSON")
    arguments = parser.parse_args()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NWOR_MODE": "stage",
        "VLLM_SCV_MODE": str(arguments.scv),
        "VLLM_NWOR_METRICS": os.environ.get("VLLM_NWOR_METRICS", "0"),
    }
    from nwor_bench.plugin.attaching import HOOK

    arguments.output.mkdir(parents=True, exist_ok=True)
    engine, worker = engine_of(arguments)
    hook, load, steps = getattr(worker, HOOK), Load(engine, arguments), Steps(worker)
    for mode in arguments.modes:
        switch(hook, mode, arguments.scv)
        load.run(arguments.rates[-1], SETTLING_S)
    requests: list[dict[str, Any]] = []
    for block in range(arguments.blocks):
        for rate in arguments.rates:
            for mode in random.Random(block).sample(arguments.modes, len(arguments.modes)):
                steps.place = None
                load.begin(block)
                switch(hook, mode, arguments.scv)
                load.run(rate, SETTLING_S)
                steps.place = (rate, block, mode)
                load.run(rate, arguments.seconds)
                times = pd.Series(load.tpot_ms)
                row = {"rate": rate, "block": block, "mode": mode, "kind": "time per token"}
                requests.append({**row, "steps": len(times), "ms": times.median()})
            steps.place = None
            table = steps.table(requests)
            table.to_csv(arguments.output / "steps.csv", index=False, float_format="%.4g")
    print(summary(table))


if __name__ == "__main__":
    main()
