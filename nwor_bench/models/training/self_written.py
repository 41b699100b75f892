"""Prompts that the target writes itself, when it is asked to go on where a user begins to write.

A chat model has learnt what users write too: after its chat template up to the open user turn it
samples a message (Magpie, Xu et al., 2024, arXiv:2406.08464). What comes is uneven, and much
wider than any templates; what is no whole message is dropped and counted by reason. Some of the
messages become texts to work on, since users' prompts often hold one and these seldom do.
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
"""Messages sampled at most for each prompt that is needed, and one batch more."""

SHORTEST = 12
"""Characters below which a message is hardly a task ("Hi.", "Thank you")."""

TEMPERATURE = 1.0
"""The model's own distribution: colder, it writes the same few messages again and again."""

_MARK = "the-user-writes-here"


@dataclass(frozen=True)
class OpenTurn:
    """Where a user begins to write.

    Attributes:
        ids: token ids of the chat template up to there.
        end: token that ends a user's turn.
    """

    ids: list[int]
    end: int


@dataclass(frozen=True)
class SelfWritten:
    """What the target wrote.

    Attributes:
        prompts: token ids of each prompt kept, in the chat template, ready to be answered.
        around: how many of them are tasks about a message, not the message as it is.
        tries: messages sampled.
        dropped: messages not kept, by reason; those left over when enough were kept are neither.
        seconds: time it took.
    """

    prompts: list[list[int]]
    around: int
    tries: int
    dropped: dict[str, int]
    seconds: float

    def counts(self) -> dict[str, Any]:
        """All but the prompts, for JSON."""
        counts = asdict(self)
        return {"kept": len(counts.pop("prompts")), **counts}


def open_turn(tokenizer: Any) -> OpenTurn:
    """The open user turn of a tokenizer's chat template, with whatever system prompt it puts.

    Raises ConfigError where there is no template, or where no token of its own ends the turn.
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
    """A text without what two prompts may differ in and still be the same: case and spaces."""
    return " ".join(text.casefold().split())


def contains_any(text: str, others: Iterable[str]) -> bool:
    """Whether one of `others` is in the text, case and spaces aside; `others` are `plain`."""
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
    """As many prompts as the recipe wants; on one device the seed alone decides which.

    Args:
        recipe: the recipe.
        target: who writes.
        tokenizer: the target's.
        held_out: texts that no prompt may be or contain.
        taken: texts that no prompt may repeat.
        step: told how many prompts a batch added.

    Raises ConfigError when the target writes too few in `TRIES` times as many tries.
    """
    import torch

    torch.manual_seed(recipe.seed)
    began = time.perf_counter()
    turn, together = open_turn(tokenizer), GENERATED_TOGETHER[target.device]
    sieve = _Sieve(recipe, tokenizer, [plain(text) for text in held_out], taken)
    kept: list[_Kept] = []
    tries, wanted = 0, recipe.self_written
    while len(kept) < wanted:
        if tries >= TRIES * wanted + together:
            raise ConfigError(_too_few(len(kept), wanted, tries, sieve.dropped))
        messages = target.write(turn.ids, together, turn.end, recipe.written_tokens, TEMPERATURE)
        tries += together
        found = [prompt for message in messages if (prompt := sieve.prompt(message)) is not None]
        found = found[: wanted - len(kept)]
        kept += found
        step(len(found))
    seconds = round(time.perf_counter() - began, 3)
    prompts, tasks = [prompt.ids for prompt in kept], sum(prompt.is_task for prompt in kept)
    return SelfWritten(prompts, tasks, tries, dict(sieve.dropped), seconds)


def _too_few(kept: int, wanted: int, tries: int, dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    return (
        f"--tokens: of {tries} prompts that the target wrote {kept} are usable, and the recipe "
        f"needs {wanted} (dropped: {reasons}); write fewer --tokens"
    )


@dataclass(frozen=True)
class _Kept:
    ids: list[int]
    is_task: bool


class _Sieve:
    """Lets whole new messages through, some as the text of a task, and counts the others."""

    def __init__(self, recipe: Recipe, tokenizer: Any, held_out: list[str], taken: Iterable[str]):
        self._recipe, self._tokenizer = recipe, tokenizer
        self._random = Random(f"around:{recipe.seed}")
        self._special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        self._held_out = held_out
        self._seen = {plain(text) for text in taken}
        self.dropped: Counter[str] = Counter()

    def prompt(self, message: list[int] | None) -> _Kept | None:
        """The prompt that the message gives, in the chat template, or None when it is dropped."""
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
        """Once more from text to tokens, as a user's text comes: not always the same ones."""
        prompt = Prompt("self-written", "training", text)
        ids = encode([prompt], self._tokenizer, max_model_len=1 << 30, max_new_tokens=0)[0]
        if contains_any(text, self._held_out):
            return ids, "held out"
        return ids, "too long" if len(ids) > self._recipe.prompt_tokens else None
