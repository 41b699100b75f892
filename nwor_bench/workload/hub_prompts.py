"""Prompts from the rows of a hub data set."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.workload.prompt import Prompt, first_turn
from nwor_bench.workload.scenario import PromptSource

HubLoader = Callable[[str, str | None, str], Iterable[Mapping[str, Any]]]
"""(dataset, configuration, split) -> rows."""


def hub_prompts(
    source: PromptSource, loader: HubLoader | None, fits: Callable[[Prompt], bool]
) -> list[Prompt]:
    """The first `limit` prompts that fit; `loader` replaces the `datasets` library.

    Raises ConfigError if the data set cannot be read, a column is missing or holds no text, or no
    row gives a prompt that fits.
    """
    assert source.dataset is not None  # PromptSource refuses hub without a data set
    rows = (loader or _datasets_rows)(source.dataset, source.dataset_config, source.split)
    found: list[Prompt] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        prompt = _prompt(source, number, row)
        if isinstance(prompt, str):
            left_out[prompt] += 1
        elif not fits(prompt):
            left_out["of another length or category"] += 1
        else:
            found.append(prompt)
            if len(found) == source.limit:
                break
    if not found:
        raise _nothing_found(source, left_out)
    return found


def _prompt(source: PromptSource, number: int, row: Mapping[str, Any]) -> Prompt | str:
    """The row's prompt, or why it is left out."""
    value = _cell(row, "field", source.field or "")
    category = "hub"
    if source.category_field is not None:
        category = str(_cell(row, "category_field", source.category_field))
    if any(row.get(name) != wanted for name, wanted in source.where.items()):
        return "not those of `where`"
    try:
        text = first_turn(value)
    except TypeError as error:
        remedy = f"row {number}: {error}; name a column of texts"
        raise ConfigError.for_field("prompts.field", source.field, remedy) from error
    if text is None:
        return "empty or placeholders"
    if source.instruction:
        text = f"{source.instruction}\n\n{text}"
    return Prompt(f"{source.dataset}-{number}", category, text)


def _cell(row: Mapping[str, Any], key: str, column: str) -> Any:
    if column not in row:
        raise ConfigError.unknown(f"prompts.{key}", column, row)
    return row[column]


def _nothing_found(source: PromptSource, left_out: Counter[str]) -> ConfigError:
    counts = ", ".join(f"{count} {why}" for why, count in left_out.items()) or "there are none"
    remedy = f"no row of {source.dataset} gives a prompt ({counts}); change [prompts]"
    return ConfigError.for_field("prompts.field", source.field, f"{remedy} in the scenario")


def _datasets_rows(dataset: str, config: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    """Stream a data set with the optional `datasets` library."""
    remedy = 'pip install datasets and be online, or write source = "builtin" in [prompts]'
    try:
        load_dataset = import_module("datasets").load_dataset
    except ImportError as error:
        raise ConfigError.for_field("prompts.dataset", dataset, remedy) from error
    try:
        yield from load_dataset(dataset, config, split=split, streaming=True)
    except Exception as error:  # the library passes on whatever its network client raises
        message = f"it did not load ({error}); {remedy}"
        raise ConfigError.for_field("prompts.dataset", dataset, message) from error
