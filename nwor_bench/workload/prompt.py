"""A prompt, and its text in a row of a data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    A request is one turn, so later turns are not used. None where there is no text: null, an empty
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
