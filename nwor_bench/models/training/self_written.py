"""Prompts written by the target: it continues an open user turn of its chat template.

A chat model has also learnt what users write (Magpie, Xu et al., 2024, arXiv:2406.08464). Its
messages vary more than templates. Unusable messages are dropped and counted by reason. Some
messages become the text of a task, because users' prompts often contain a text and these seldom do.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.training.recipe import Recipe
from nwor_bench.models.training.target import GENERATED_TOGETHER, Target
from nwor_bench.models.training.templates import around
from nwor_bench.workload.prompts import Prompt, encode

TRIES = 4
"""At most this many messages are sampled per prompt needed, plus one batch."""

SHORTEST = 12
"""Shortest message in characters; shorter ones are rarely tasks ("Hi.", "Thank you")."""

TEMPERATURE = 1.0
"""The model's own distribution; at lower temperatures it repeats a few messages."""

_MARK = "the-user-writes-here"


@dataclass(frozen=True)
class OpenTurn:
    """An open user turn.

    Attributes:
        ids: token ids of the chat template up to the user's message.
        end: token that ends the user's turn.
    """

    ids: list[int]
    end: int


@dataclass(frozen=True)
class SelfWritten:
    """Prompts that the target wrote.

    Attributes:
        prompts: token ids of each prompt kept, in the chat template.
        around: how many prompts are tasks about a message.
        tries: messages sampled.
        dropped: messages dropped, by reason; surplus usable messages are not counted.
        seconds: time taken.
    """

    prompts: list[list[int]]
    around: int
    tries: int
    dropped: dict[str, int]
    seconds: float

    def counts(self) -> dict[str, Any]:
        """Everything except the prompts, for JSON."""
        counts = asdict(self)
        return {"kept": len(counts.pop("prompts")), **counts}


def open_turn(tokenizer: Any) -> OpenTurn:
    """The open user turn of a tokenizer's chat template, including its default system prompt.

    Raises ConfigError without a chat template, or if no special token ends the user's turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError.for_field(
            "target: chat_template", None, "only a target with one can write prompts itself"
        )
    message = [{"role": "user", "content": _MARK}]
    begin, mark, rest = tokenizer.apply_chat_template(message, tokenize=False).partition(_MARK)
    closing = tokenizer.encode(rest, add_special_tokens=False)
    if not mark or not closing or closing[0] not in tokenizer.get_added_vocab().values():
        raise ConfigError.for_field(
            "target: chat_template", rest, "a special token must end the user's turn"
        )
    return OpenTurn(tokenizer.encode(begin, add_special_tokens=False), closing[0])


def plain(text: str) -> str:
    """A text in lower case with single spaces, to compare prompts."""
    return " ".join(text.casefold().split())


def contains_any(text: str, others: Iterable[str]) -> bool:
    """True if one of `others` (already `plain`) is in the text, ignoring case and spaces."""
    text = plain(text)
    return any(other in text for other in others)


def write_prompts(
    recipe: Recipe,
    target: Target,
    tokenizer: Any,
    held_out: Iterable[str],
    taken: Iterable[str],
    step: Callable[[int], None],
) -> SelfWritten:
    """As many prompts as the recipe needs; on one device the seed alone decides which.

    Args:
        recipe: the recipe.
        target: the model that writes.
        tokenizer: the target's tokenizer.
        held_out: texts that no prompt may contain.
        taken: texts that no prompt may repeat.
        step: called with the number of prompts that a batch added.

    Raises ConfigError if `TRIES` messages per prompt do not give enough prompts.
    """
    import torch

    torch.manual_seed(recipe.seed)
    began = time.perf_counter()
    turn, together = open_turn(tokenizer), GENERATED_TOGETHER[target.device]
    filtered = _Filter(recipe, tokenizer, [plain(text) for text in held_out], taken)
    kept: list[_Kept] = []
    tries, wanted = 0, recipe.self_written
    while len(kept) < wanted:
        if tries >= TRIES * wanted + together:
            raise _too_few(len(kept), wanted, tries, filtered.dropped)
        messages = target.write(turn.ids, together, turn.end, recipe.written_tokens, TEMPERATURE)
        tries += together
        prompts = map(filtered.prompt, messages)
        found = [prompt for prompt in prompts if prompt is not None][: wanted - len(kept)]
        kept += found
        step(len(found))
    seconds = round(time.perf_counter() - began, 3)
    ids, tasks = [prompt.ids for prompt in kept], sum(prompt.is_task for prompt in kept)
    return SelfWritten(ids, tasks, tries, dict(filtered.dropped), seconds)


def _too_few(kept: int, wanted: int, tries: int, dropped: Counter[str]) -> ConfigError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    return ConfigError.at(
        "--tokens",
        f"of {tries} prompts that the target wrote {kept} are usable, and the recipe "
        f"needs {wanted} (dropped: {reasons}); write fewer --tokens",
        kept,
    )


@dataclass(frozen=True)
class _Kept:
    ids: list[int]
    is_task: bool


class _Filter:
    """Makes prompts of new, complete messages, some as the text of a task; counts the others."""

    def __init__(self, recipe: Recipe, tokenizer: Any, held_out: list[str], taken: Iterable[str]):
        self._recipe, self._tokenizer = recipe, tokenizer
        self._random = Random(f"around:{recipe.seed}")
        self._special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        self._held_out = held_out
        self._seen = {plain(text) for text in taken}
        self.dropped: Counter[str] = Counter()

    def prompt(self, message: list[int] | None) -> _Kept | None:
        """The message as a prompt in the chat template; None if it is dropped."""
        text = self._tokenizer.decode(message or []).strip()
        reason = self._fault(message, text)
        if reason is None:
            is_task = self._random.random() < self._recipe.around_share
            prompt = around(text, self._random) if is_task else text
            ids, reason = self._encoded(prompt)
            if reason is None:
                self._seen.add(plain(text))
                return _Kept(ids, is_task)
        self.dropped[reason] += 1
        return None

    def _fault(self, message: list[int] | None, text: str) -> str | None:
        if message is None:
            return "never ended"
        if self._special.intersection(message):
            return "with special tokens inside"
        if len(text) < SHORTEST:
            return "too short"
        return "repeated" if plain(text) in self._seen else None

    def _encoded(self, text: str) -> tuple[list[int], str | None]:
        """Token ids of the text, and the reason to drop it. Ids may differ from those sampled."""
        prompt = Prompt("self-written", "training", text)
        ids = encode([prompt], self._tokenizer, max_model_len=1 << 30, max_new_tokens=0)[0]
        if contains_any(text, self._held_out):
            return ids, "held out"
        return ids, "too long" if len(ids) > self._recipe.prompt_tokens else None
