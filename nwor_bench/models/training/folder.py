"""The folder of one training: recipe, checkpoint and result. A stopped training resumes from it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.models.pairs.local import write_json
from nwor_bench.models.training.recipe import Recipe
from nwor_bench.records.json_text import parse_json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

RECIPE_FILE = "recipe.json"
SEQUENCES_FILE = "sequences.json"
TRAINING_FILE = "training.json"
HEAD = "head"
CHECKPOINT = "checkpoint.pt"
CHECKPOINT_VERSION = 1


def begin_folder(folder: Path, recipe: Recipe) -> None:
    """Make a new folder with the recipe in it. Raises ConfigError if it is not empty."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError.for_field(
                "--output", str(folder), "it is not empty; name a new folder, or resume it: "
                f"--resume {folder}",
            )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECIPE_FILE, recipe.to_dict())
    except OSError as error:
        raise ConfigError.for_field(
            "--output", str(folder), f"it cannot be written ({error.strerror}); name another folder"
        ) from error


def resumed_recipe(folder: Path, name: str, given: dict[str, int | None]) -> Recipe:
    """The recipe in a training's folder.

    Raises ConfigError if the folder holds no unfinished training or `given` values differ from the
    recipe; StoreError for a damaged recipe.
    """
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise ConfigError.for_field("--resume", str(folder), f"it holds no {RECIPE_FILE}")
    try:
        stored: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        recipe = Recipe.from_dict(stored)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError.at(path, f"cannot be read ({error}); start a new training") from error
    if recipe.name != name:
        raise ConfigError.for_field("drafter", name, f"the training in {folder} is {recipe.name}")
    for flag, value in given.items():
        if value not in (None, stored[flag]):
            raise ConfigError.for_field(
                f"--{flag}", value, f"the training uses {stored[flag]}; leave it out"
            )
    if (folder / HEAD / TRAINING_FILE).is_file():
        raise ConfigError.for_field("--resume", str(folder), "the training is done")
    return recipe


@dataclass
class Position:
    """Progress of a training.

    Attributes:
        step: optimiser steps done.
        losses: sums over the current epoch's steps, by loss.
        epochs: one row per finished epoch; row 0 is the untrained head.
        seconds: time spent in training steps.
    """

    step: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def save_checkpoint(folder: Path, head: "nn.Module", optimizer: "Optimizer", at: Position) -> None:
    """Replace the checkpoint atomically, so that a killed training keeps the last one."""
    import torch

    partial = folder / f"{CHECKPOINT}.partial"
    content = {
        "version": CHECKPOINT_VERSION,
        "head": head.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": vars(at),
    }
    torch.save(content, partial)
    partial.replace(folder / CHECKPOINT)


def load_checkpoint(
    folder: Path, head: "nn.Module", optimizer: "Optimizer", device: str
) -> Position:
    """Restore head and optimiser; returns the position.

    Raises ConfigError without a checkpoint, StoreError if it is damaged or of another version.
    """
    import torch

    path = folder / CHECKPOINT
    if not path.is_file():
        raise ConfigError.for_field("--resume", str(folder), f"it holds no {CHECKPOINT}")
    try:
        stored = torch.load(path, map_location=device, weights_only=True)
        if stored["version"] != CHECKPOINT_VERSION:
            raise StoreError.at(
                f"{path}: version",
                f"{stored['version']!r} is unknown",
                stored["version"],
                joint=" ",
            )
        head.load_state_dict(stored["head"])
        optimizer.load_state_dict(stored["optimizer"])
        return Position(**stored["position"])
    except StoreError:
        raise
    except Exception as error:  # torch raises many types of errors for a truncated file
        raise StoreError.at(path, f"cannot be read ({error}); start a new training") from error
