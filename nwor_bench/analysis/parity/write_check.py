"""The gate's check of writes: staged drafts reach the cache by the commit, and only accepted ones.

A mode that writes every draft at once and counts it as staged gives the right tokens and counts
but saves nothing. Only this check finds it.
"""

from collections.abc import Mapping, Sequence


def write_fault(ranks: Sequence[Mapping[str, int]], accepted: int) -> str | None:
    """The fault in a gate batch's writes, in words; None if there is none.

    Args:
        ranks: the writes that each rank's `WriteWatch` saw, the first rank first.
        accepted: accepted drafts of the batch's staged windows.
    """
    for rank, seen in enumerate(ranks):
        where = f" on rank {rank}" if len(ranks) > 1 else ""
        if seen["early"]:
            return f"writes: {seen['early']} staged rows were written before their commit{where}"
        if seen["uneven"]:
            return f"writes: {seen['uneven']} rows were not written in every layer alike{where}"
        least = accepted - seen["without_slot"]
        if seen["windows"] and not least <= seen["written"] <= accepted:
            return (
                f"writes: {seen['written']} drafts are in the cache after their commits{where}, "
                f"but {accepted} were accepted"
            )
    return None
