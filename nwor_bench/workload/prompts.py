"""Prompts: load them for a scenario, and turn them into token ids."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import parse_json, read_text
from nwor_bench.workload.config import PromptSource, Scenario
from nwor_bench.workload.resources import resource_dir

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""How a text of SPEED-Bench begins that only NVIDIA's prepare script fills in."""


@dataclass(frozen=True)
class Prompt:
    """A user's message; `id` is unique within its source."""

    id: str
    category: str
    text: str


def first_turn(value: Any) -> str | None:
    """The user's first turn: a text, the first of a list of texts, or of messages with `content`.

    A request is one turn, so later turns are not used. None if there is no text: null, an empty
    list, blanks, a placeholder. Raises TypeError for what holds no text, such as token ids.
    """
    if isinstance(value, list | tuple):
        value = _first_of_user(value)
    if value is None or isinstance(value, str):
        return None if _is_blank(value) else value
    raise TypeError(f"{type(value).__name__} is no text, nor a list of texts or messages")


def _is_blank(text: str | None) -> bool:
    """True if there is no text, or a placeholder for one."""
    return text is None or not text.strip() or text.startswith(PLACEHOLDER)


def _first_of_user(turns: list[Any] | tuple[Any, ...]) -> Any:
    """The first turn that is not another role's; None without one."""
    for turn in turns:
        if not isinstance(turn, Mapping):
            return turn
        if turn.get("role", "user") == "user":
            return turn.get("content")
    return None


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


__all__ = [
    "Encode",
    "Prompt",
    "builtin_categories",
    "encode",
    "load_prompts",
    "load_tokenizer",
    "read_jsonl",
    "with_own_prompts",
]

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")

TEXT_KEYS = ("text", "prompt", "turns", "messages")
"""Keys of a JSONL line's text: a text each, a list of texts, or messages with `content`."""

Encode = Callable[[tuple[Prompt, ...]], list[list[int]]]
"""Prompts to token ids, with the target's tokenizer."""


def load_prompts(scenario: Scenario, hub_loader: HubLoader | None = None) -> list[Prompt]:
    """All prompts that fit the scenario's source, categories and lengths, in a fixed order.

    `hub_loader` replaces the `datasets` library. Raises ConfigError if the source cannot be read or
    no prompt fits.
    """
    source = scenario.prompts
    if source.source == "builtin":
        prompts = _builtin(source)
    elif source.source == "jsonl":
        prompts = _jsonl(source)
    else:
        return hub_prompts(source, hub_loader, lambda prompt: _fits(prompt, source))
    fitting = [prompt for prompt in prompts if _fits(prompt, source)]
    if not fitting:
        upper = source.max_chars or "any number of"
        raise ConfigError.at(
            f"scenario {scenario.name!r}",
            f"none of its {len(prompts)} prompts has "
            f"{source.min_chars} to {upper} characters and a category in "
            f"{list(source.categories) or 'any'}; change [prompts] in the scenario",
        )
    return fitting


def _fits(prompt: Prompt, source: PromptSource) -> bool:
    length = len(prompt.text)
    return (not source.categories or prompt.category in source.categories) and (
        source.min_chars <= length and (source.max_chars is None or length <= source.max_chars)
    )


def builtin_categories() -> tuple[str, ...]:
    """Categories of the prompts that ship with nwor-bench: one JSONL file each."""
    return tuple(sorted(path.stem for path in _builtin_dir().glob("*.jsonl")))


def _builtin_dir() -> Path:
    return resource_dir("scenarios") / "prompts"


def _builtin(source: PromptSource) -> list[Prompt]:
    known = builtin_categories()
    for category in source.categories:
        if category not in known:
            raise ConfigError.unknown("prompts.categories", category, known)
    wanted = source.categories or known
    return [p for name in wanted for p in read_jsonl(_builtin_dir() / f"{name}.jsonl", name)]


def _jsonl(source: PromptSource) -> list[Prompt]:
    assert source.path is not None  # PromptSource refuses jsonl without a path
    return read_jsonl(source.path)


def read_jsonl(path: Path, category: str = "user") -> list[Prompt]:
    """Prompts of a JSONL file: one of `TEXT_KEYS`, optional `id` and `category`.

    Of several turns the first is the prompt. A prompt without an id is named after its line,
    `line-7`. Raises ConfigError with file and line.
    """
    try:
        lines = read_text(path).split("\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError.at(path, f"cannot be read ({reason}); name a JSONL file") from error
    except ValueError as error:
        raise ConfigError.at(path, f"is {error}") from error
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _prompt_of_line(f"{path}:{number}", number, line, category)
        if prompt.id in seen:
            raise ConfigError.for_field(f"{path}:{number}: id", prompt.id, "write a unique one")
        seen.add(prompt.id)
        prompts.append(prompt)
    return prompts


def with_own_prompts(scenario: Scenario, path: Path) -> Scenario:
    """The scenario with all prompts of the user's JSONL file instead of its own.

    Raises ConfigError with file and line for what is no prompt.
    """
    if not read_jsonl(path):
        raise ConfigError.for_field("--prompts", str(path), 'it is empty; write {"text": "..."}')
    source = PromptSource(source="jsonl", path=path)
    return scenario.model_copy(update={"prompts": source})


def _prompt_of_line(where: str, number: int, line: str, category: str) -> Prompt:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError.at(where, f'is not JSON ({error}); write {{"text": "..."}}') from error
    names = [key for key in TEXT_KEYS if key in row] if isinstance(row, dict) else []
    if len(names) != 1:
        keys = ", ".join(f"`{key}`" for key in TEXT_KEYS)
        raise ConfigError.at(where, f"write an object with one of {keys}")
    values: dict[str, Any] = {"id": f"line-{number}", "category": category}
    values |= {key: row[key] for key in ("id", "category") if key in row}
    for key, value in values.items():
        if not isinstance(value, str) or not value.strip():
            raise _no_text(f"{where}: {key}", value)
    return Prompt(values["id"], values["category"], _text(f"{where}: {names[0]}", row[names[0]]))


def _text(where: str, value: Any) -> str:
    try:
        text = first_turn(value)
    except TypeError as error:
        raise _no_text(where, value) from error
    if text is None:
        raise _no_text(where, value)
    if not text.isascii() and _HALF_CHARACTER.search(text):
        raise ConfigError.for_field(where, text, "it has half a character (\\ud800 to \\udfff)")
    return text


def _no_text(where: str, value: Any) -> ConfigError:
    return ConfigError.for_field(where, value, "write a text, neither empty nor a placeholder")


def encode(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    max_model_len: int,
    max_new_tokens: int,
    tokens: int | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, through the tokenizer's chat template if it has one.

    With `tokens` each is repeated or cut to that length; prompts that differ in their first
    tokens stay different.

    Raises ConfigError, naming the longest prompt, when one of them and `max_new_tokens` do
    not fit into `max_model_len` together (all in tokens).
    """
    encoded = [_of_length(_token_ids(tokenizer, prompt), tokens) for prompt in prompts]
    longest = max(range(len(encoded)), key=lambda i: len(encoded[i]), default=None)
    if longest is None:
        return []
    needed = len(encoded[longest]) + max_new_tokens
    if needed > max_model_len:
        raise ConfigError.for_field(
            "--max-model-len",
            max_model_len,
            f"prompt {prompts[longest].id!r} has {len(encoded[longest])} tokens and "
            f"--max-new-tokens adds {max_new_tokens}; write at least {needed}, or use shorter "
            "prompts (max_chars in the scenario)",
        )
    return encoded


def _token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    else:
        ids = tokenizer.encode(prompt.text)
    if len(ids) == 0:
        raise ConfigError.at(
            f"prompt {prompt.id!r}", "has no tokens; write some text in it", joint=" "
        )
    return list(ids)


def _of_length(ids: list[int], tokens: int | None) -> list[int]:
    if tokens is None:
        return ids
    return (ids * (tokens // len(ids) + 1))[:tokens]


@lru_cache(maxsize=4)
def load_tokenizer(target: str | Path) -> Any:
    """The tokenizer of a model folder or hub name; ConfigError when there is none.

    Kept, since the runs of a sweep file share a target or two.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(target))
    except Exception as error:  # files of the model's own raise errors of any kind
        raise ConfigError.for_field(
            "--target-model",
            str(target),
            f"its tokenizer did not load ({error}); name a folder with tokenizer files",
        ) from error
