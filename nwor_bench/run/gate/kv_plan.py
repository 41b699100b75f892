"""Positions that the K/V gate checks, and sequences that mode off prefills together. Pure."""

from collections.abc import Sequence

Span = tuple[int, int]
"""First position of a request and the one behind the last."""


def committed_positions(prompt_length: int, output_length: int) -> int:
    """Positions whose K/V the cache must hold: all tokens but the last, which is only sampled."""
    return max(prompt_length + output_length - 1, 0)


def choose_spans(lengths: Sequence[tuple[int, int]], room: int) -> list[Span]:
    """The last positions of each request, `room` of them in all.

    Output positions of all requests come first, since staging writes those; then the prompts',
    from their ends. If room is short, the shortest requests are covered completely.

    Args:
        lengths: (prompt, output) tokens of each request.
        room: most positions of all requests together.
    """
    committed = [committed_positions(*each) for each in lengths]
    outputs = [
        max(total - prompt, 0) for total, (prompt, _) in zip(committed, lengths, strict=True)
    ]
    shares = _evenly(outputs, room)
    prompts = [total - output for total, output in zip(committed, outputs, strict=True)]
    if shares == outputs:
        more = _evenly(prompts, room - sum(shares))
        shares = [share + extra for share, extra in zip(shares, more, strict=True)]
    return [(total - share, total) for total, share in zip(committed, shares, strict=True)]


def _evenly(wanted: Sequence[int], room: int) -> list[int]:
    """Split `room` evenly: no request gets more than it wants; the rest goes to the others."""
    shares = [0] * len(wanted)
    left = max(room, 0)
    by_size = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for place, i in enumerate(by_size):
        shares[i] = min(wanted[i], left // (len(wanted) - place))
        left -= shares[i]
    return shares


def groups_that_fit(lengths: Sequence[int], block_size: int, blocks: int) -> list[list[int]]:
    """Indices of sequences in order, in groups whose blocks fit into the cache together.

    Otherwise vLLM would reuse a finished sequence's blocks before its K/V is checked. A sequence
    that is too large for the cache is a group of its own.

    Args:
        lengths: tokens of each sequence, drafts that vLLM reserves room for included.
        block_size: tokens a block.
        blocks: blocks that the cache can give away.
    """
    groups: list[list[int]] = []
    free = 0
    for number, length in enumerate(lengths):
        needed = -(-length // block_size)
        if not groups or needed > free:
            groups.append([])
            free = blocks
        groups[-1].append(number)
        free -= needed
    return groups


def halves(numbers: Sequence[int]) -> list[list[int]]:
    """The same indices in two groups; none for a single one, which has no other batch shape."""
    middle = len(numbers) // 2
    return [list(numbers[:middle]), list(numbers[middle:])] if middle else []
