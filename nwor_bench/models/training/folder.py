"""The folder of one training: begun once, gone on with as often as needed."""

from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.models.pairs.json_file import write_json
from nwor_bench.models.training.recipe import Recipe
from nwor_bench.records.json_text import parse_json

RECIPE_FILE = "recipe.json"
SEQUENCES_FILE = "sequences.json"
TRAINING_FILE = "training.json"
HEAD = "head"


def begin_folder(folder: Path, recipe: Recipe) -> None:
    """Make a new folder for that recipe. Raises ConfigError for one that is not empty."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError.for_field(
                "--output", str(folder), "it is not empty; name a new folder, or go on with it: "
                f"--resume {folder}",
            )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECIPE_FILE, recipe.to_dict())
    except OSError as error:
        raise ConfigError.for_field(
            "--output", str(folder), f"it cannot be written ({error.strerror}); name another folder"
        ) from error


def resumed_recipe(folder: Path, name: str, given: dict[str, int | None]) -> Recipe:
    """The recipe that a folder was begun with.

    Raises ConfigError for a folder of no training or of a finished one, and for values that say
    otherwise; StoreError for a damaged recipe.
    """
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise ConfigError.for_field("--resume", str(folder), f"it holds no {RECIPE_FILE}")
    try:
        stored: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        recipe = Recipe.from_dict(stored)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); start the training anew") from error
    if recipe.name != name:
        raise ConfigError.for_field("drafter", name, f"the training in {folder} is {recipe.name}")
    for field, value in given.items():
        if value not in (None, stored[field]):
            raise ConfigError.for_field(
                f"--{field}", value, f"the training was begun with {stored[field]}; leave it out"
            )
    if (folder / HEAD / TRAINING_FILE).is_file():
        raise ConfigError.for_field("--resume", str(folder), "the training is done")
    return recipe
