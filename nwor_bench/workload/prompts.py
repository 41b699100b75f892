"""Prompts: load them for a scenario, and turn them into token ids."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import parse_json
from nwor_bench.workload.config import PromptSource, Scenario
from nwor_bench.workload.toml_file import resource_dir, text_of

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""How a text of SPEED-Bench begins that only NVIDIA's prepare script fills in."""


@dataclass(frozen=True)
class Prompt:
    """A user's message; `id` is unique within its source."""

    id: str
    category: str
    text: str


_HALF_CHARACTER = re.compile("[\ud800-\udfff]")

TEXT_KEYS = ("text", "prompt", "turns", "messages")
"""Keys of a JSONL line's text: a text each, a list of texts, or messages with `content`."""

Encode = Callable[[tuple[Prompt, ...]], list[list[int]]]
"""Prompts to token ids, with the target's tokenizer."""


def load_prompts(scenario: Scenario) -> list[Prompt]:
    """All prompts that fit the scenario's categories and lengths, in a fixed order.

    Raises ConfigError if the source cannot be read or no prompt fits.
    """
    source = scenario.prompts
    prompts = _builtin(source) if source.path is None else read_jsonl(source.path)
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


def read_jsonl(path: Path, category: str = "user") -> list[Prompt]:
    """Prompts of a JSONL file: one of `TEXT_KEYS`, optional `id` and `category`.

    Of several turns the first is the prompt. A prompt without an id is named after its line,
    `line-7`. Raises ConfigError with file and line.
    """
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(text_of(path, "JSONL").split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _prompt_of_line(f"{path}:{number}", number, line, category)
        if prompt.id in seen:
            raise ConfigError.for_field(f"{path}:{number}: id", prompt.id, "write a unique one")
        seen.add(prompt.id)
        prompts.append(prompt)
    return prompts


def with_own_prompts(scenario: Scenario, file: str | Path | None) -> Scenario:
    """The scenario with all prompts of the user's JSONL file, if there is one, instead of its own.

    Raises ConfigError with file and line for what is no prompt.
    """
    if file is None:
        return scenario
    path = Path(file)
    if not read_jsonl(path):
        raise ConfigError.for_field("--prompts", str(file), 'it is empty; write {"text": "..."}')
    return scenario.model_copy(update={"prompts": PromptSource(path=path)})


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
    return Prompt(
        values["id"], values["category"], _first_turn(f"{where}: {names[0]}", row[names[0]])
    )


def _first_turn(where: str, value: Any) -> str:
    """The user's first turn: a text, the first of a list of texts, or of messages."""
    turn = value
    if isinstance(value, list):
        users = (
            turn.get("content") if isinstance(turn, Mapping) else turn
            for turn in value
            if not isinstance(turn, Mapping) or turn.get("role", "user") == "user"
        )
        turn = next(users, None)
    if not isinstance(turn, str) or not turn.strip() or turn.startswith(PLACEHOLDER):
        raise _no_text(where, value)
    if not turn.isascii() and _HALF_CHARACTER.search(turn):
        raise ConfigError.for_field(where, turn, "it has half a character (\\ud800 to \\udfff)")
    return turn


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
            "--model",
            str(target),
            f"its tokenizer did not load ({error}); name a folder with tokenizer files",
        ) from error
