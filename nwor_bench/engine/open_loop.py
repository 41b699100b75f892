"""Requests that come at their own times, on an engine in this process."""

import time
from collections.abc import Sequence
from typing import Any

from nwor_bench.engine.protocol import Sampling


def vllm_params(sampling: Sampling) -> Any:
    """vLLM's `SamplingParams`."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
    )


def serve_loop(
    llm_engine: Any,
    prompts: Sequence[Sequence[int]],
    arrivals_s: Sequence[float],
    sampling: Sampling,
) -> tuple[float, list[Any]]:
    """Seconds to the last token, and the RequestOutputs as they ended.

    A request that comes during a step is added behind it. Requests beyond `max_num_seqs` wait in
    vLLM's queue.

    Args:
        llm_engine: vLLM's `LLMEngine`, without requests.
        arrivals_s: of each prompt, rising.
    """
    began = time.perf_counter()
    come = 0
    done: list[Any] = []
    while len(done) < len(prompts):
        waited = time.perf_counter() - began
        while come < len(prompts) and arrivals_s[come] <= waited:
            prompt = {"prompt_token_ids": list(prompts[come])}
            llm_engine.add_request(f"served{come}", prompt, vllm_params(sampling))
            come += 1
        if len(done) == come:
            time.sleep(arrivals_s[come] - waited)
        else:
            done += [output for output in llm_engine.step() if output.finished]
    return time.perf_counter() - began, done
