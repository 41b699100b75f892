"""The model card of a trained head: all figures come from the training's own record."""

from pathlib import Path
from typing import Any


def write_card(path: Path, record: dict[str, Any]) -> None:
    """Write README.md for a head; `record` is training.json's content."""
    recipe, data, software = record["recipe"], record["data"], record["software"]
    rows = "\n".join(_row(row) for row in record["epochs"])
    positions = " | ".join(f"draft {i + 1}" for i in range(recipe["draft_tokens"]))
    sampled = data["sampled_sequences"]
    path.write_text(
        f"""# {recipe["name"]}: an EAGLE head for {record["target"]}

One decoder layer and a layer that fuses token and hidden state: {record["parameters"]:,} \
parameters in {record["dtype"]}. Embedding and output layer are the target's, so this drafts for \
that model only. Made by `nwor-bench pairs train {recipe["name"]}`, which makes it anew.

## Data
{data["training_sequences"]:,} answers of {recipe["answer_tokens"]} tokens \
({data["training_tokens"]:,} tokens) that the target generated to prompts filled in from \
templates: {data["training_sequences"] - sampled:,} greedy, {sampled:,} drawn at temperature \
{recipe["temperature"]:g}. Held out: {data["held_out_sequences"]:,} prompts of the shipped \
scenarios, none of which was trained on.

## Training
{record["steps"]:,} steps in {len(record["epochs"]) - 1} epochs, {recipe["batch"]} sequences a \
step, AdamW with a learning rate up to {recipe["learning_rate"]:g}, seed {recipe["seed"]}. Loss: \
cross-entropy with the target's distribution plus {recipe["hidden_weight"]:g} x smooth-L1 between \
hidden states, over {recipe["draft_tokens"]} drafts of which each continues from the one before.
It took {record["training_s"]:.0f} s of steps and {_seconds(data["generating_s"])} to generate the \
data, on {record["machine"]} (torch {software["torch"]}, transformers {software["transformers"]}).

## Held-out acceptance
Greedy windows of {recipe["draft_tokens"]} drafts on the target's greedy answers; acceptance \
length counts the bonus token. Epoch 0 is the untrained head.

| epoch | loss | cross-entropy | smooth-L1 | acceptance length | {positions} |
|---{"|---" * (4 + recipe["draft_tokens"])}|
{rows}
""",
        encoding="utf-8",
    )


def _row(row: dict[str, Any]) -> str:
    found = row["held_out"]
    numbers = [row["loss"], row["cross_entropy"], row["smooth_l1"], found["acceptance_length"]]
    shares = list(found["rates"] or [None] * len(found["accepted"]))
    cells = ["" if number is None else f"{number:.3f}" for number in numbers + shares]
    return f"| {row['epoch']} | {' | '.join(cells)} |"


def _seconds(value: float | None) -> str:
    return "an unknown time" if value is None else f"{value:.0f} s"
