"""What would happen to a model: staging, nearest measurements, GPUs and bytes. Nothing is run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nwor_bench.instruments.cards import CARDS, CPU, Card
from nwor_bench.models.byte_model import (
    MAX_GPUS,
    MEMORY_SHARE,
    Workload,
    gpus_needed,
    requests_that_fit,
)
from nwor_bench.models.measured import MeasuredRow, nearest_rows
from nwor_bench.models.support.predict import MethodSupport, Support
from nwor_bench.report.document import Block, Bullets, Document, Headline, Section, Table, table
from nwor_bench.report.plan_bytes import BytePrediction, bytes_notes, bytes_sections, bytes_values
from nwor_bench.report.support import answer, layers_table, methods_lines, notes, support_values
from nwor_bench.report.text import count, decimal, joined, plural
from nwor_bench.report.text import two_digits as percent


@dataclass(frozen=True)
class ModelPlan:
    """The prediction for a model, a step and a device."""

    support: Support
    methods: tuple[MethodSupport, ...]
    load: Workload
    predicted: BytePrediction | None
    """None if the byte model does not cover the model."""
    why_no_bytes: str = ""
    card: Card | None = None
    """The device that was asked for; None for all GPUs."""
    origin: str = ""
    """The place of the config.json."""

    @property
    def has_time(self) -> bool:
        """True if measurements may say something: what is staged on a GPU."""
        return self.support.reason is None and self.predicted is not None and self.card is not CPU

    @property
    def nearest(self) -> tuple[MeasuredRow, ...]:
        """The measured settings most like this one."""
        if self.predicted is None or not self.has_time:
            return ()
        return nearest_rows(self.predicted.model.shape, self.load.requests, self.load.context)

    @property
    def cards(self) -> Sequence[Card]:
        """GPUs of the table."""
        if self.card is None:
            return CARDS
        return () if self.card is CPU else (self.card,)


def plan_document(plan: ModelPlan) -> Document:
    """The answer, what it rests on, and tables; sections that are not brief are details."""
    parts: list[Block] = [Headline("", headline(plan)), Bullets(tuple(_facts(plan)))]
    if plan.nearest:
        parts.append(_measured(plan.nearest))
    parts.append(layers_table(plan.support))
    if plan.predicted is not None and plan.cards:
        parts.append(_gpus(plan, plan.predicted))
    details: tuple[Section, ...] = ()
    assumed = notes(plan.support)
    if plan.predicted is not None:
        details = bytes_sections(plan.predicted)
        assumed = [*assumed, *bytes_notes(plan.predicted)]
    last = Section("What is assumed", (Bullets(tuple(assumed)),))
    return Document(f"Plan: {plan.support.model.name}", tuple(parts), (*details, last))


def headline(plan: ModelPlan) -> str:
    """What is staged, and what staging did to the time of a window."""
    said = answer(plan.support)
    return f"{said} {measured_words(plan.nearest)}" if plan.has_time else said


def measured_words(rows: Sequence[MeasuredRow]) -> str:
    """The nearest settings in one sentence; those written as stock are always named."""
    if not rows:
        return "No model of its kind was measured."
    ratios = dict.fromkeys(f"{row.ratio:.3f}" for row in rows if row.ratio is not None)
    told = [f"{joined([*ratios])} times stock's time of a window"] if ratios else []
    told += ["written as stock, no gain"] if any(row.ratio is None for row in rows) else []
    return f"Nearest settings measured: {'; '.join(told)}."


def _facts(plan: ModelPlan) -> Iterator[str]:
    """What the answer rests on, one fact a line."""
    support, load, predicted = plan.support, plan.load, plan.predicted
    backends = ", ".join(support.backends) or "no attention"
    where = plan.card.label if plan.card else support.engine.device.value.capitalize()
    yield (
        f"{support.model.architecture or support.model.model_type} on {where}: vLLM's "
        f"{support.runner.value} runner, {backends}. Config: {plan.origin}"
    )
    ranks = f" on each of {load.ranks} ranks" if load.ranks > 1 else ""
    yield (
        f"One step: {plural(load.requests, 'request')} x {plural(load.draft_tokens, 'draft')}, "
        f"{load.context:,} tokens of context each, {percent(load.acceptance)} of drafts accepted "
        "(--acceptance)."
    )
    if predicted is None:
        yield f"Bytes and memory are not predicted: {plan.why_no_bytes}."
    else:
        yield predicted.size_words
        yield predicted.saving_words(ranks)
    yield from methods_lines(plan.methods)


def _measured(rows: Sequence[MeasuredRow]) -> Table:
    """What staging did to the time of a window in the nearest settings."""
    return table(
        ["Model", "Requests", "Context", "Cache", "Time over stock [95 % interval]", "Verdict"],
        [
            [row.model, count(row.requests), count(row.context), row.cache,
             "" if row.ratio is None else f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]",
             row.verdict]
            for row in rows
        ],
        numbers_from=1,
        caption="Nearest measured on an H200: 4 drafts, 40 % accepted (2.6 tokens a window)",
    )  # fmt: skip


def _gpu_values(plan: ModelPlan, predicted: BytePrediction) -> Iterator[dict[str, Any]]:
    """How the model fits GPUs of each kind; None if MAX_GPUS of them do not hold it."""
    model, has_one_slot = predicted.model, _has_one_slot(plan, predicted)
    for card in plan.cards:
        memory = card.memory_bytes
        gpus = gpus_needed(memory, model, plan.load)
        load = replace(plan.load, ranks=gpus or 1)
        fit = None if gpus is None else requests_that_fit(memory, model, load)
        one_slot = requests_that_fit(memory, model, load, 1) if gpus and has_one_slot else None
        yield {
            "gpu": card.name,
            "memory_bytes": memory,
            "gb_per_s": card.gb_per_s,
            "gpus_needed": gpus,
            "requests_that_fit": fit,
            "requests_with_one_slot": one_slot,
            "predicted_step_ms": model.step(load) / card.gb_per_s / 1e6 if gpus else None,
        }


def _has_one_slot(plan: ModelPlan, predicted: BytePrediction) -> bool:
    states = predicted.model.shape.recurrent
    return states is not None and states.ring_bytes(plan.load.draft_tokens) > 0


def _gpus(plan: ModelPlan, predicted: BytePrediction) -> Table:
    rows = [
        [card.label, f"{card.memory_gib} GiB", f"{card.gb_per_s:,} GB/s",
         str(found["gpus_needed"] or f"over {MAX_GPUS}"), count(found["requests_that_fit"]),
         count(found["requests_with_one_slot"]), decimal(found["predicted_step_ms"])]
        for card, found in zip(plan.cards, _gpu_values(plan, predicted), strict=True)
    ]  # fmt: skip
    headers = ["GPU", "memory", "bandwidth", "GPUs needed", "requests that fit", "with one slot",
               "step, at least (ms)"]  # fmt: skip
    if not _has_one_slot(plan, predicted):
        for row in (headers, *rows):
            del row[-2]
    return table(
        headers,
        rows,
        caption=f"GPUs that hold the weights and {plural(plan.load.requests, 'request')} in "
        f"{100 * MEMORY_SHARE:.0f} % of their memory",
    )


def plan_values(plan: ModelPlan) -> dict[str, Any]:
    """Everything for JSON; units are in the names, `predicted_` marks the byte model's numbers."""
    predicted = plan.predicted
    return {
        "model": plan.support.model.name,
        "headline": headline(plan),
        "support": support_values(plan.support, plan.methods),
        "measured": [asdict(row) for row in plan.nearest],
        "gpus": [] if predicted is None else [*_gpu_values(plan, predicted)],
        "bytes": None if predicted is None else bytes_values(predicted),
        "why_no_bytes": plan.why_no_bytes or None,
    }
