"""Partial results that a launch of the verification kernel writes besides its output. Pure.

The same arithmetic as `division.py`'s on the device, on the host's integers.
"""

from collections.abc import Iterator, Sequence

from nwor_kernels.verify_attention.tuning import MAX_PARTS, LaunchShape


def partial_bytes(
    seq_lens: Sequence[int],
    staged: Sequence[int],
    query_rows: Sequence[int],
    kv_heads: int,
    shape: LaunchShape,
    programs: int,
) -> int:
    """Bytes of partial results that one launch (one layer) leaves in its workspace.

    Dropped ones (`Discard.L2`) count too: it is the GPU that decides what becomes of them.

    Args:
        seq_lens: tokens of each request, those of its window included.
        staged: staged tokens of each; 0 for a request without a window.
        query_rows: query rows of each that share a K/V head, its query tokens times the GQA
            ratio; no others are written.
        kv_heads: K/V heads.
        shape: of the launch; models without a sliding window.
        programs: programs that were launched, at most `shape.programs`.

    Raises:
        ValueError: the sequences are not equally long.
    """
    steps = _all_steps(seq_lens, staged, shape)
    parts = list(_parts(steps, kv_heads * shape.row_tiles, shape, programs))
    total = 0
    for rows, of_request in zip(query_rows, parts, strict=True):
        for pair, shared_by in enumerate(of_request):
            if shared_by > 1:  # a pair that one program has alone leaves nothing
                in_tile = min(max(rows - pair % shape.row_tiles * shape.rows, 0), shape.rows)
                # float32: the accumulator's rows, and maximum and sum of padding rows too
                total += shared_by * 4 * (in_tile * shape.dim + 2 * shape.rows)
    return total


def busy_programs(
    seq_lens: Sequence[int],
    staged: Sequence[int],
    kv_heads: int,
    shape: LaunchShape,
    programs: int,
) -> int:
    """How many of the programs get any step; the arguments are `partial_bytes`'s."""
    steps = _all_steps(seq_lens, staged, shape)
    pairs = kv_heads * shape.row_tiles
    part, multiple = _cut(steps, pairs, shape, programs)
    return -(-sum(_slots(n, multiple) for n in steps) * pairs // part)


def _all_steps(seq_lens: Sequence[int], staged: Sequence[int], shape: LaunchShape) -> list[int]:
    return [_steps(*pair, shape.block_n) for pair in zip(seq_lens, staged, strict=True)]


def _steps(seq_len: int, staged: int, block_n: int) -> int:
    """Steps of one pair: its context's, and the window's."""
    return -(-max(seq_len - staged, 0) // block_n) + 1 if staged else 0


def _parts(
    steps: Sequence[int], pairs: int, shape: LaunchShape, programs: int
) -> Iterator[list[int]]:
    """For each request, the programs that share each of its pairs."""
    part, multiple = _cut(steps, pairs, shape, programs)
    at = 0
    for of_request in steps:
        slots = _slots(of_request, multiple)
        firsts = range(at, at + slots * pairs, slots) if slots else ()
        yield [(first + slots - 1) // part - first // part + 1 for first in firsts]
        at += slots * pairs


def _slots(steps: int, multiple: int) -> int:
    return -(-steps // multiple) * multiple


def _cut(steps: Sequence[int], pairs: int, shape: LaunchShape, programs: int) -> tuple[int, int]:
    """`division.cut`: steps a program, of which a pair's are rounded up to a multiple."""
    all_steps, most = sum(steps) * pairs, max(steps)
    busy_pairs = sum(1 for n in steps if n) * pairs
    least = max(-(-most // MAX_PARTS), shape.min_tiles)
    part = max(-(-all_steps // programs), least)
    aligned = -(-most // max(programs // max(busy_pairs, 1), 1))
    aligned = max(min(aligned, -(-all_steps // max(programs - busy_pairs, 1))), least)
    is_cheap = busy_pairs <= programs and aligned <= part + part // 4 + 1
    if is_cheap:
        return aligned, aligned
    whole = -(-busy_pairs // programs) * most
    is_whole = busy_pairs > programs and whole * 100 <= part * (100 + shape.whole_pairs)
    return (whole, most) if shape.whole_pairs and is_whole else (part, 1)
