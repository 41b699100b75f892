"""Draft counts: the line for vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nwor_bench.analysis.draft_rates import Worth
from nwor_bench.instruments.draft_counts import SAFE_GRAPHS, capture_size
from nwor_bench.records.header import PairFacts
from nwor_bench.report.document import Block, Code, Paragraph
from nwor_bench.report.text import plural

STAGING = "VLLM_NWOR_MODE=stage VLLM_SCV_MODE=adaptive"
"""The variables of a server that stages."""

CAPTURED = 512
"""Tokens of the largest window that vLLM captures by default; 1,024 on Blackwell."""


def speculative_config(schedule: Sequence[Sequence[int]], pair: PairFacts) -> dict[str, Any] | None:
    """vLLM's speculative_config by the draft counts of batch sizes; None for no speculation."""
    most = max((drafts for _, _, drafts in schedule), default=0)
    if not most:
        return None
    real = {
        name: value
        for name, value in (pair.speculative or {}).items()
        if value != "synthetic" and not name.startswith("synthetic_")
    }
    config: dict[str, Any] = {**real, "method": pair.method}
    if pair.draft is not None:
        config["model"] = pair.draft
    config["num_speculative_tokens"] = most
    if len(schedule) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(each) for each in schedule]
    return config


def line_config(worth: Worth, pair: PairFacts) -> dict[str, Any] | None:
    """vLLM's speculative_config by what was found; None for no speculation. From engines of one
    count each it has one count for all batch sizes (`Worth.best_fixed`)."""
    schedule = worth.schedule
    if _has_one_count(worth):
        schedule = [[1, max(worth.best), worth.best_fixed or 0]]
    return speculative_config(schedule, pair)


def _has_one_count(worth: Worth) -> bool:
    """True if batch sizes ask for several counts, and no engine had several."""
    return len(worth.schedule) > 1 and worth.by_engines


def line_blocks(
    worth: Worth, pair: PairFacts, *, staged: bool = False, captured: int | None = None
) -> Iterator[Block]:
    """The line, and with `staged` that of a server that stages if it is another.

    `captured`: tokens of the largest window that had a graph as it was measured.
    """
    config = line_config(worth, pair)
    if all(rate.ratio is None for rate in worth.rates):
        return  # nothing is known
    if _has_one_count(worth):
        yield Paragraph(
            "Every engine had one draft count. So the line has one for all batch sizes: a larger k "
            "only if its gain, as geometric mean over the sizes of values and bounds, is sure."
        )
    if config is None:
        yield Paragraph("For vLLM: leave --speculative-config out.")
    else:
        largest = plural(max(worth.best), "request")
        yield Paragraph(
            "For vLLM, only from differences beyond interval and noise, elsewhere the smaller k. "
            f"Above {largest} nothing was measured, and vLLM goes on with the last k:"
        )
        yield _code(config)
        yield from _graphs_note(config, max(worth.best), captured or 0)
    if staged and worth.best_staged:
        yield from _staged_line(worth, pair, config)


def _graphs_note(config: Mapping[str, Any], largest: int, captured: int) -> Iterator[Paragraph]:
    """What a server needs to have the graphs that were measured, and to be safe with them."""
    schedule = config.get("num_speculative_tokens_per_batch_size")
    single = [[1, largest, config["num_speculative_tokens"]]]
    tokens = max(size * (drafts + 1) for _, size, drafts in schedule or single)
    graphs: dict[str, Any] = {}
    why: list[str] = []
    if schedule:
        graphs["cudagraph_mode"] = SAFE_GRAPHS
        why.append(
            "under changing draft counts vLLM 0.32.0 died with its default graphs, also without "
            "nwor-bench (docs/worth.md)"
        )
    if CAPTURED < tokens <= captured:
        graphs["max_cudagraph_capture_size"] = capture_size(tokens)
        why.append(
            f"by default vLLM captures no window above {CAPTURED} tokens, and those measured were"
        )
    if graphs:
        asked = f"--compilation-config '{json.dumps(graphs)}'"
        yield Paragraph(f"On a GPU serve it with {asked}: {'; '.join(why)}.")


def _staged_line(worth: Worth, pair: PairFacts, stock: dict[str, Any] | None) -> Iterator[Block]:
    """The line by the times of staged windows."""
    config = speculative_config(worth.staged_schedule, pair)
    if config == stock:
        yield Paragraph(f"It is the same for a server that stages ({STAGING}).")
    elif config is None:
        yield Paragraph(f"For a server that stages ({STAGING}): leave --speculative-config out.")
    else:
        yield Paragraph(f"For a server that stages ({STAGING}):")
        yield _code(config)


def _code(config: Mapping[str, Any]) -> Code:
    return Code(f"--speculative-config '{json.dumps(config)}'")
