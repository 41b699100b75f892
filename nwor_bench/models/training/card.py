"""The model card of a trained head: all figures come from the training's own record."""

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

One decoder layer and a layer that fuses token and hidden state: {record["parameters"]:,} \
parameters in {record["dtype"]}. Embedding and output layer are the target's, so this drafts for \
that model only. Made by `nwor-bench pairs train {recipe["name"]}`, which makes it anew.

## Data
{data["training_sequences"]:,} answers of {recipe["answer_tokens"]} tokens \
({data["training_tokens"]:,} tokens) that the target generated, \
{data["training_sequences"] - sampled:,} of them greedy and {sampled:,} drawn at temperature \
{recipe["temperature"]:g}. Their prompts: {data["prompts_from_templates"]:,} filled in from \
templates, {data["prompts_self_written"]:,} written by the target itself. {_written(data)}\
Held out: {data["held_out_sequences"]:,} prompts of the shipped scenarios, none of which was \
trained on.

## Training
{record["steps"]:,} steps in {len(record["epochs"]) - 1} epochs, {recipe["batch"]} sequences a \
step, AdamW with a learning rate up to {recipe["learning_rate"]:g}, seed {recipe["seed"]}. Loss: \
cross-entropy with the target's distribution plus {recipe["hidden_weight"]:g} x smooth-L1 between \
hidden states, over {recipe["draft_tokens"]} drafts of which each continues from the one before.
It took {record["training_s"]:.0f} s of steps and {_seconds(data["generating_s"])} to generate \
the answers, on {record["machine"]} (torch {software["torch"]}, transformers \
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
    """What became of the target's own prompts; a sentence, or nothing where it wrote none."""
    written = data["self_written"]
    if written is None:
        return ""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in written["dropped"].items())
    return (
        f"Of these {written['around']:,} are tasks about a message that it wrote, the others "
        f"messages as they are. It wrote {written['tries']:,} messages in "
        f"{_seconds(written['seconds'])}, of which were dropped: "
        f"{reasons or 'none'}; what was left over was not used. "
    )


def _table(rows: list[dict[str, Any]], index: int, length: int, draft_tokens: int) -> str:
    """One row an epoch; `index` is where its `held_out` has answers of that length."""
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
