"""What a server in which draft counts are interleaved changes in vLLM.

Its configuration names every count, so that vLLM captures their CUDA graphs; its scheduler changes
the count with the steps, by vLLM's own lookup (`instruments.draft_counts`).
"""

import logging
from collections.abc import Callable
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.instruments.draft_counts import (
    SAFE_GRAPHS,
    UNSAFE_GRAPHS,
    WHICH_CHANGE,
    WHY_NOT_ADAPTIVE,
    WHY_UNSAFE,
    CountSwitch,
    changes_count,
    schedule_of,
)
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.settings import DRAFTS
from nwor_bench.records.cell import ADAPTIVE_VERIFICATION
from nwor_bench.records.window_order import UNDELIVERED

logger = logging.getLogger("vllm.nwor_bench")


def draft_patches() -> list[Patch]:
    """Name every draft count in vLLM's configuration, and change them in its scheduler.

    Raises ConfigError if vLLM lacks what this needs.
    """
    if (reason := lost(Feature.COUNTS)) is not None:
        raise ConfigError.at(DRAFTS, f"draft counts cannot be interleaved here: {reason}")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler

    return [
        Patch(EngineArgs, "create_speculative_config", _name_counts),
        Patch(Scheduler, "__init__", _interleave),
    ]


def _name_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_speculative_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(arguments, *args, **kwargs)
        name_counts(config, arguments.max_num_seqs)
        _choose_graphs(arguments.compilation_config)
        return config

    return create_speculative_config


def _choose_graphs(config: Any) -> None:
    """Full graphs only, unless another mode is given. Raises ConfigError for UNSAFE_GRAPHS.

    Args:
        config: vLLM's CompilationConfig as given, before its defaults.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    if config.cudagraph_mode is None:
        config.cudagraph_mode = CUDAGraphMode[SAFE_GRAPHS]
    elif config.cudagraph_mode is CUDAGraphMode[UNSAFE_GRAPHS]:
        field = "--compilation-config: cudagraph_mode"
        raise ConfigError.for_field(field, config.cudagraph_mode.name, WHY_UNSAFE)


def _interleave(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        interleave_counts(scheduler, scheduler.num_spec_tokens)

    return initialize


def interleave_counts(scheduler: Any, most: int) -> None:
    """Interleave 0 to `most` drafts in vLLM's scheduler, and note what it cuts off."""
    CountSwitch(scheduler, range(most + 1)).interleave_for_good(most)
    undelivered, update = 0, scheduler._update_request_with_output
    schedule = scheduler.schedule

    def update_request(request: Any, tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        """Count the tokens that stock cuts off behind a request's last one."""
        nonlocal undelivered
        sampled = len(tokens)
        kept, stopped = update(request, tokens, *args, **kwargs)
        undelivered += sampled - len(kept)
        return kept, stopped

    def schedule_and_tell(*args: Any, **kwargs: Any) -> Any:
        nonlocal undelivered
        output = schedule(*args, **kwargs)
        if output.scheduled_spec_decode_tokens:
            setattr(output, UNDELIVERED, undelivered)
            undelivered = 0
        return output

    scheduler._update_request_with_output = update_request
    scheduler.schedule = schedule_and_tell


def name_counts(config: Any, max_num_seqs: int | None) -> None:
    """Let vLLM's speculative configuration name 0 to its number of drafts, before any graph.

    Args:
        config: vLLM's SpeculativeConfig; None without speculation.
        max_num_seqs: as given; None for vLLM's default, which is large.

    Raises ConfigError if its draft count cannot change.
    """
    flag = "--speculative-config"
    if config is None:
        example = '{"method": "mtp", "num_speculative_tokens": 4}'
        raise ConfigError.for_field(flag, None, f"{DRAFTS} needs it, for example '{example}'")
    if not changes_count(config.method):
        raise ConfigError.for_field(f"{flag}: method", config.method, WHICH_CHANGE)
    if getattr(config, ADAPTIVE_VERIFICATION, False):
        raise ConfigError.for_field(f"{flag}: {ADAPTIVE_VERIFICATION}", True, WHY_NOT_ADAPTIVE)
    ranks = config.target_parallel_config.data_parallel_size
    if ranks > 1:
        remedy = "vLLM keeps one draft count with data parallelism; start one server each"
        raise ConfigError.for_field("--data-parallel-size", ranks, remedy)
    counts = range(config.num_speculative_tokens + 1)
    if max_num_seqs is not None and max_num_seqs < len(counts):
        remedy = f"vLLM captures CUDA graphs for as many draft counts; write {len(counts)} or more"
        raise ConfigError.for_field("--max-num-seqs", max_num_seqs, remedy)
    config.num_speculative_tokens_per_batch_size = schedule_of(counts)
    logger.info("nwor: 0 to %d drafts are interleaved, with NWOR off", counts[-1])
