"""The values of a scenario that flags and sweep files may replace."""

from typing import Annotated

from nwor_bench.workload.options import Axis, Option, Panel, within

MOST_BLOCKS = 10_000
"""Timed blocks that a run may have; each is drawn before the first begins."""


def _fraction_above_zero(value: float) -> str | None:
    if value <= 0:
        return "write a number greater than 0"
    return "write 1 or less" if value > 1 else None


class ScenarioValues:
    """How many prompts run at once and how the model decodes; `Scenario` adds the prompts.

    A plain class whose annotations pydantic takes over, so that --help reads them without it. The
    upper limits catch slips of the keyboard before their prompts fill the memory.
    """

    # fmt: off
    requests: Annotated[int, Option(
        "Requests a batch.", Panel.WORKLOAD, aliases=("--num-prompts",), check=within(1, 100_000),
        axis=Axis(2, "{} requests", "r{}", shares_engine=True),
    )]
    """Prompts of a batch, all at once."""
    batches: Annotated[int, Option(
        "Timed blocks (with --ci-width: at least).", Panel.WORKLOAD, check=within(1, MOST_BLOCKS),
        table="settings",
    )]
    """Timed blocks: in each, every cell runs once on the same prompts."""
    warmup: Annotated[int, Option(
        "Untimed batches first, at least: more until times are steady.", Panel.WORKLOAD,
        check=within(0), table="settings",
    )] = 1
    """Untimed batches a cell."""
    draft_tokens: Annotated[int, Option(
        "Drafts a request and window.", Panel.WORKLOAD,
        aliases=("--num-speculative-tokens",), check=within(1),
        axis=Axis(1, "{} drafts", "k{}"),
    )]
    """Tokens that the drafter proposes to each request, each window."""
    max_new_tokens: Annotated[int, Option(
        "Tokens to generate a request.", Panel.WORKLOAD, check=within(2), table="settings",
    )]
    """Tokens that a request generates at most; the prefill gives the first, without a window."""
    temperature: Annotated[float, Option(
        "0 is greedy.", Panel.WORKLOAD, check=within(0),
        axis=Axis(3, "temperature {:g}", "t{:g}", shares_engine=True),
    )] = 0.0
    """Of sampling; 0 is greedy."""
    top_p: Annotated[float, Option(
        "Nucleus sampling.", has_flag=False, check=_fraction_above_zero,
    )] = 1.0
    """Share of the probability that sampling chooses from."""
    max_model_len: Annotated[int, Option(
        "Prompt plus output, tokens.", Panel.WORKLOAD, check=within(2), table="settings",
        engine_argument="max_model_len",
    )]
    """Tokens of a request's prompt and output together, at most."""
    ignore_eos: Annotated[bool, Option(
        "Generate on after the end-of-sequence token.", has_flag=False,
    )] = True
    """Generate `max_new_tokens` whatever the model says."""
    # fmt: on
