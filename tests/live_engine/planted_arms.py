"""Engine processes of arms with a fault planted in vLLM. Imported by those processes."""

import time
from typing import Any

from nwor_bench.engine.arms import _serve as serve

SLEEP_S = 0.25
"""Sleep before a forward, which takes 1 to 5 ms: with other programs on both cores 0.1 was lost in
the scatter of eight batches."""


def slow(*args: Any) -> None:
    """Serve an engine that sleeps before each forward."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.execute_model

    def execute_model(runner: Any, *given: Any, **named: Any) -> Any:
        time.sleep(SLEEP_S)
        return original(runner, *given, **named)

    GPUModelRunner.execute_model = execute_model  # type: ignore[method-assign]
    serve(*args)


def shifted(*args: Any) -> None:
    """Serve an engine whose drafts are the ids behind those that the drafter proposes."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.propose_draft_token_ids

    def propose(runner: Any, *given: Any, **named: Any) -> Any:
        drafts = original(runner, *given, **named)
        return (drafts + 1) % runner.model_config.get_vocab_size()

    GPUModelRunner.propose_draft_token_ids = propose  # type: ignore[method-assign]
    serve(*args)


def wrong(*args: Any) -> None:
    """Serve an engine whose first window with drafts gives another token."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    original, planted = RejectionSampler.forward, []

    def forward(sampler: Any, metadata: Any, *given: Any, **named: Any) -> Any:
        output = original(sampler, metadata, *given, **named)
        if metadata.max_spec_len and not planted:
            planted.append(True)
            output.sampled_token_ids[0, 0] ^= 1
        return output

    RejectionSampler.forward = forward  # type: ignore[method-assign]
    serve(*args)
