"""Arms that are ways to draft (`worth --arm`): a name, and entries of vLLM's speculative_config.

    {"eagle3": {"method": "eagle3", "model": "FOLDER"}, "ngram": {"method": "ngram"}}

Two entries are ours: `num_speculative_tokens` may be a list, and `engines` is true if each of the
arm's draft counts needs an engine of its own. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nwor_bench.errors import ConfigError

METHOD, MODEL, NUMBER, OWN_ENGINES = "method", "model", "num_speculative_tokens", "engines"

SPECULATION = "speculative_config"

MethodArm = Mapping[str, Any]


def counts_of(arm: MethodArm, counts: Sequence[int]) -> tuple[int, ...]:
    """The arm's draft counts: those that it names, or 1 to the number that it names, otherwise the
    run's; with 0 if one engine runs them all."""
    named = arm.get(NUMBER, counts)
    chosen = range(1, named + 1) if isinstance(named, int) else named
    zero = () if arm.get(OWN_ENGINES) else (0,)
    return (*zero, *sorted(set(chosen) - {0}))


def entries_of(arm: MethodArm) -> dict[str, Any]:
    """The arm's entries of speculative_config beside method, drafter and number."""
    return {k: v for k, v in arm.items() if k not in (METHOD, MODEL, NUMBER, OWN_ENGINES)}


def arms_refused(arms: Mapping[str, MethodArm], counts: Sequence[int]) -> Iterator[ConfigError]:
    """Draft counts that the run does not compare."""
    for name, arm in arms.items():
        named = arm.get(NUMBER, max(counts))
        every = named if isinstance(named, list) else [named]
        fits = all(type(k) is int and 0 <= k <= max(counts) for k in every)
        if not fits or max(every, default=0) < 1:
            remedy = f"write 1 to {max(counts)} (--max-draft-tokens), or a list such as [1, 3]"
            yield ConfigError.for_field(f"--arm: {name}: {NUMBER}", named, remedy)
