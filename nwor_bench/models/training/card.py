"""The model card of a trained head, written from training.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_card(path: Path, record: dict[str, Any]) -> None:
    """Write README.md for a head; `record` is training.json's content."""
    recipe, data, software = record["recipe"], record["data"], record["software"]
    tables = "\n\n".join(
        _table(record["epochs"], index, length, recipe["draft_tokens"])
        for index, length in enumerate(recipe["held_out_tokens"])
    )
    sampled = data["sampled_sequences"]
    path.write_text(
        f"""# {recipe["name"]}: an EAGLE head for {record["target"]}

A drafter with {record["parameters"]:,} parameters in {record["dtype"]}: a layer that fuses token \
and hidden state, then one decoder layer. It uses the target's embedding and output layer, so it \
drafts for that model only. `nwor-bench pairs train {recipe["name"]}` trains it again.
SHA-256 of model.safetensors: `{record["weights_sha256"]}`.

## Data
| data | count |
|---|---|
| answers by the target, {recipe["answer_tokens"]} tokens each | \
{data["training_sequences"]:,} ({data["training_tokens"]:,} tokens) |
| of these greedy | {data["training_sequences"] - sampled:,} |
| of these sampled at temperature {recipe["temperature"]:g} | {sampled:,} |
| prompts from templates | {data["prompts_from_templates"]:,} |
| prompts written by the target | {data["prompts_self_written"]:,} |
{_written(data)}\
| held-out prompts (shipped scenarios, not trained on) | {data["held_out_sequences"]:,} |

## Training
{record["steps"]:,} steps in {len(record["epochs"]) - 1} epochs, {recipe["batch"]} sequences per \
step, AdamW with a learning rate up to {recipe["learning_rate"]:g}, seed {recipe["seed"]}. Loss: \
cross-entropy with the target's distribution plus {recipe["hidden_weight"]:g} x smooth-L1 between \
hidden states, over {recipe["draft_tokens"]} consecutive drafts.
Time: {record["training_s"]:.0f} s for the steps, {_seconds(data["generating_s"])} for the \
answers, on {record["machine"]} (torch {software["torch"]}, transformers \
{software["transformers"]}).

## Held-out acceptance
Greedy windows of {recipe["draft_tokens"]} drafts on the target's greedy answers, over the first \
{_lengths(recipe["held_out_tokens"])} tokens of each; the scenario `short` generates 32. \
Acceptance length counts the bonus token. Epoch 0 is the untrained head.

{tables}
""",
        encoding="utf-8",
    )


def _lengths(lengths: Sequence[int]) -> str:
    return " and over the first ".join(map(str, lengths))


def _written(data: dict[str, Any]) -> str:
    """Rows on the prompts that the target wrote; empty if it wrote none."""
    written = data["self_written"]
    if written is None:
        return ""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in written["dropped"].items())
    return (
        f"| of these tasks about a message | {written['around']:,} |\n"
        f"| messages written for them | {written['tries']:,} in {_seconds(written['seconds'])} |\n"
        f"| messages dropped | {reasons or 'none'} |\n"
    )


def _table(rows: list[dict[str, Any]], index: int, length: int, draft_tokens: int) -> str:
    """A table with one row per epoch; `index` is the place of `length` in `held_out`."""
    positions = " | ".join(f"draft {i + 1}" for i in range(draft_tokens))
    lines = [
        f"### Over the first {length} tokens of an answer",
        "",
        f"| epoch | loss | cross-entropy | smooth-L1 | acceptance length | {positions} |",
        f"|{'---|' * (5 + draft_tokens)}",
        *(_row(row, row["held_out"][index]) for row in rows),
    ]
    return "\n".join(lines)


def _row(row: dict[str, Any], found: dict[str, Any]) -> str:
    numbers = [row["loss"], row["cross_entropy"], row["smooth_l1"], found["acceptance_length"]]
    shares = list(found["rates"] or [None] * len(found["accepted"]))
    cells = ["" if number is None else f"{number:.3f}" for number in numbers + shares]
    return f"| {row['epoch']} | {' | '.join(cells)} |"


def _seconds(value: float | None) -> str:
    return "an unknown time" if value is None else f"{value:.0f} s"
