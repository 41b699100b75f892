"""Draft counts alternate in a server, 0 among them: k changes with the steps, by vLLM's own lookup.

Times and tokens need windows of different kinds. Times come from groups of twelve neighbouring
windows that only decode, A B B A with k = 0, as those of modes. Tokens come from the spans between
them, of some windows at one k: a window begins where the one before it ended, and right behind
another k that is at other places of the text. A span goes on through prefills, and no span has
k = 0, whose tokens are known: a server under test speculates in most of its steps.
"""

import logging
from collections.abc import Callable
from itertools import cycle
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.draft_counts import (
    CHANGES_COUNT,
    SAFE_GRAPHS,
    UNSAFE_GRAPHS,
    WHICH_CHANGE,
    WHY_NOT_ADAPTIVE,
    WHY_UNSAFE,
    DraftSwitch,
    schedule_of,
)
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.settings import DRAFTS
from nwor_bench.records.cell import ADAPTIVE_VERIFICATION
from nwor_bench.records.window_order import (
    PLACE,
    SERVER_DRAFT_RUN_LENGTHS,
    SERVER_SEED,
    UNDELIVERED,
    places_of,
)

logger = logging.getLogger("vllm.nwor_bench")

SPAN = 36
"""Steps between two groups, all at one k."""

PATIENCE = 16
"""Steps that a group may take to begin: where each step has a prefill only spans are left."""


def counts_of(most: int) -> tuple[int, ...]:
    """Draft count of each cell: 0 to `most`, and 0 again for the A/A groups."""
    return (*range(most + 1), 0)


class DraftTurns(DraftSwitch):
    """The order of a server.

    Args:
        scheduler: vLLM's; its lookup must name 0 to `most`.
    """

    def __init__(self, scheduler: Any, most: int):
        super().__init__(scheduler, range(most + 1))
        self._counts = counts_of(most)
        pairs = [(0, cell) for cell in range(1, len(self._counts))]
        self._places = places_of(pairs, SERVER_SEED, SERVER_DRAFT_RUN_LENGTHS)
        self._at, self._coming = next(self._places), next(self._places)
        self._spans = cycle(range(1, most + 1))
        self._undelivered = 0
        self._stock_update = scheduler._update_request_with_output
        scheduler._update_request_with_output = self._update_request
        self._begin_span()

    def _update_request(self, request: Any, tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        """Count the tokens that stock cuts off behind a request's last one."""
        sampled = len(tokens)
        kept, stopped = self._stock_update(request, tokens, *args, **kwargs)
        self._undelivered += sampled - len(kept)
        return kept, stopped

    def _begin_span(self) -> None:
        self._span_left, self._patience = SPAN, PATIENCE
        self._set(next(self._spans))

    def _settle(self, output: Any) -> bool:
        if output.scheduled_spec_decode_tokens:
            setattr(output, UNDELIVERED, self._undelivered)
            self._undelivered = 0
        return super()._settle(output)

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._span_left:
            output = self._original(*args, **kwargs)
            if self._settle(output):
                setattr(output, PLACE, None)
            self._span_left -= bool(output.num_scheduled_tokens)
            return output
        assert self._at is not None
        group = self._at.group
        output = super()._schedule(*args, **kwargs)
        has_begun = self._at.run or self._at.position
        self._patience -= not has_begun
        if self._at.group != group or not self._patience:
            self._begin_span()
        return output


def draft_patches() -> list[Patch]:
    """Name every draft count in vLLM's configuration, and change them in its scheduler."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler

    return [
        Patch(EngineArgs, "create_speculative_config", _name_counts),
        Patch(Scheduler, "__init__", _take_turns),
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


def _take_turns(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        DraftTurns(scheduler, scheduler.num_spec_tokens)

    return initialize


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
    if config.method not in CHANGES_COUNT:
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
