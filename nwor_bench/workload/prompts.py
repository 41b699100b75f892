"""Prompts: load them for a scenario, choose each block's, and turn them into token ids."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import parse_json, read_text
from nwor_bench.workload.hub_prompts import HubLoader, hub_prompts
from nwor_bench.workload.prompt import Prompt, first_turn
from nwor_bench.workload.resources import resource_dir
from nwor_bench.workload.scenario import PromptSource, Scenario

__all__ = [
    "Encode",
    "Prompt",
    "builtin_categories",
    "encode",
    "load_prompts",
    "load_tokenizer",
    "read_jsonl",
    "select_blocks",
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


def select_blocks(
    prompts: Sequence[Prompt], requests: int, blocks: int, seed: int
) -> list[list[Prompt]]:
    """The prompts of blocks 0 to `blocks` - 1, `requests` each, the same for every cell.

    Deterministic by (seed, block), for any number of blocks. Categories take turns. Within a block
    no prompt repeats while unused ones are left. Over the blocks the least used come first, so that
    later blocks have new text while any is left.
    """
    if not prompts:
        raise ConfigError("there are no prompts to choose from")
    used: Counter[str] = Counter()
    chosen: list[list[Prompt]] = []
    for block in range(blocks):
        chosen.append(_choose(prompts, requests, used, Random(f"{seed}:{block}")))
        used.update(prompt.id for prompt in chosen[block])
    return chosen


def _choose(
    prompts: Sequence[Prompt], requests: int, used: Mapping[str, int], random: Random
) -> list[Prompt]:
    queues: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: (used.get(p.id, 0), random.random())):
        queues[prompt.category].append(prompt)

    def uses(category: str) -> tuple[int, float]:
        return sum(used.get(p.id, 0) for p in queues[category]), random.random()

    categories = sorted(queues, key=uses)
    longest = max(map(len, queues.values()))
    turns = [
        queues[category][turn]
        for turn in range(longest)
        for category in categories
        if turn < len(queues[category])
    ]
    return [turns[i % len(turns)] for i in range(requests)]


def encode(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    max_model_len: int,
    max_new_tokens: int,
    tokens: int | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, through the tokenizer's chat template where it has one.

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
