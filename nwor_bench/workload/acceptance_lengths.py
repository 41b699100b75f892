"""Acceptance lengths by name: what published models gain a window, for synthetic acceptance. Pure.

The numbers are the golden acceptance lengths of SemiAnalysis' InferenceX for 4 draft tokens with
thinking on: tokens that a request gains a window, the bonus token included.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from nwor_bench.errors import ConfigError

NAMED_LENGTHS: Mapping[str, float] = {
    "deepseek-v4": 2.54,
    "glm-5.2": 3.33,
    "kimi-k2.5": 3.24,
    "kimi-k3": 3.22,
    "minimax-m3": 3.11,
    "qwen3.5": 3.97,
}
"""Mean tokens a window with NAMED_DRAFTS drafts, by the model's name."""

NAMED_DRAFTS = 4
"""Draft tokens a window for which the named lengths were measured."""


def parse_length(flag: str, given: Any) -> float:
    """The length that a number or a name stands for. Raises ConfigError."""
    if isinstance(given, str) and given.strip().lower() in NAMED_LENGTHS:
        return NAMED_LENGTHS[given.strip().lower()]
    try:
        length = float(given)
    except ValueError:
        raise ConfigError.unknown(flag, given, list(NAMED_LENGTHS)) from None
    if not isfinite(length):
        raise ConfigError.for_field(flag, given, "write a number such as 2.6, or a name")
    return length


def check_length(flag: str, given: Any, draft_tokens: int) -> None:
    """Refuse a length that no window of so many drafts gives, and a name for other windows.

    A window gives a request from one token to all its drafts plus one. Raises ConfigError.
    """
    length = parse_length(flag, given)
    if isinstance(given, str) and given.strip().lower() in NAMED_LENGTHS:
        if draft_tokens != NAMED_DRAFTS:
            remedy = (
                f"it was measured with {NAMED_DRAFTS} draft tokens, and this run has "
                f"{draft_tokens}; write --draft-tokens {NAMED_DRAFTS}, or a number"
            )
            raise ConfigError.for_field(flag, given, remedy)
    elif not 1 <= length <= draft_tokens + 1:
        remedy = f"write 1 to {draft_tokens + 1}: what a window of {draft_tokens} drafts can give"
        raise ConfigError.for_field(flag, given, remedy)
