"""A scenario's values that flags and sweep files change. `--help` reads them without pydantic."""

from typing import Annotated

from annotated_types import Ge, Interval

from nwor_bench.workload.options import Axis, Option, Panel

MAX_DRAWN_BLOCKS = 10_000
"""Timed blocks that a run may have; each is drawn before the first begins."""


class ScenarioValues:
    """How many prompts run at once and how the model decodes; `Scenario` adds the prompts.

    A plain class whose annotations pydantic takes over, so that --help reads them without it. The
    upper limits catch typing errors before their prompts fill the memory.
    """

    # fmt: off
    requests: Annotated[int, Option(
        "Requests per batch.", Panel.WORKLOAD, aliases=("--num-prompts",),
        axis=Axis(2, "{} requests", "r{}", shares_engine=True),
    ), Interval(ge=1, le=100_000)]
    batches: Annotated[int, Option(
        "Timed blocks (with --ci-width: at least); 0 only checks the output.", Panel.WORKLOAD,
        table="settings",
    ), Interval(ge=0, le=MAX_DRAWN_BLOCKS)]
    warmup: Annotated[int, Option(
        "Fewest untimed batches first; more run until times are steady.", Panel.WORKLOAD,
        table="settings",
    ), Ge(0)] = 1
    draft_tokens: Annotated[int, Option(
        "Drafts per request and window.", Panel.WORKLOAD,
        aliases=("--num-speculative-tokens",), axis=Axis(1, "{} drafts", "k{}"),
    ), Ge(1)]
    max_new_tokens: Annotated[int, Option(
        "Tokens to generate per request.", Panel.WORKLOAD, table="settings",
    ), Ge(2)]
    """Tokens that a request generates at most; the prefill gives the first, without a window."""
    temperature: Annotated[float, Option(
        "0 is greedy.", Panel.WORKLOAD,
        axis=Axis(3, "temperature {:g}", "t{:g}", shares_engine=True),
    ), Ge(0)] = 0.0
    top_p: Annotated[float, Option(
        "Nucleus sampling.", has_flag=False,
    ), Interval(gt=0, le=1)] = 1.0
    max_model_len: Annotated[int, Option(
        "Prompt plus output, tokens.", Panel.WORKLOAD, table="settings",
        engine_argument="max_model_len",
    ), Ge(2)]
    ignore_eos: Annotated[bool, Option(
        "Generate on after the end-of-sequence token.", has_flag=False,
    )] = True
    # fmt: on
