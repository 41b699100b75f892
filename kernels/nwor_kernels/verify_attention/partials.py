"""What a launch of the verification kernel writes beside its output: partial results. Pure.

The same arithmetic as `division.py`'s on the device, on the host's integers: a byte model needs
it, since every partial result ends up in DRAM (the next layer's weights push it out of L2).
"""

from collections.abc import Iterator, Sequence

from nwor_kernels.verify_attention.tuning import MAX_PARTS, LaunchShape


def partial_bytes(
    seq_lens: Sequence[int],
    staged: Sequence[int],
    kv_heads: int,
    shape: LaunchShape,
    programs: int,
    query_rows: Sequence[int] = (),
) -> int:
    """Bytes of partial results that one launch (one layer) leaves in its workspace.

    Dropped ones (`Discard.L2`) count too: it is the GPU that decides what becomes of them.

    Args:
        seq_lens: tokens of each request, those of its window included.
        staged: staged tokens of each; 0 for a request without a window.
        kv_heads: K/V heads.
        shape: of the launch; models without a sliding window.
        programs: programs that were launched, at most `shape.programs`.
        query_rows: query rows of each request that share a K/V head, its query tokens times the
            GQA ratio; wanted only where `shape.skip_padding`.

    Raises:
        ValueError: `shape.skip_padding`, and not as many `query_rows` as requests.
    """
    if not shape.skip_padding:
        query_rows = [shape.rows * shape.row_tiles] * len(seq_lens)
    elif len(query_rows) != len(seq_lens):
        raise ValueError(f"query_rows: {len(query_rows)} numbers for {len(seq_lens)} requests")
    steps = [_steps(*pair, shape.block_n) for pair in zip(seq_lens, staged, strict=True)]
    parts = list(_parts(steps, kv_heads * shape.row_tiles, shape, programs))
    total = 0
    for rows, of_request in zip(query_rows, parts, strict=True):
        for pair, shared_by in enumerate(of_request):
            if shared_by > 1:  # a pair that one program has alone leaves nothing
                in_tile = min(max(rows - pair % shape.row_tiles * shape.rows, 0), shape.rows)
                # float32: the accumulator's rows, and maximum and sum of padding rows too
                total += shared_by * 4 * (in_tile * shape.dim + 2 * shape.rows)
    return total


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
        slots = -(-of_request // multiple) * multiple
        firsts = range(at, at + slots * pairs, slots) if slots else ()
        yield [(first + slots - 1) // part - first // part + 1 for first in firsts]
        at += slots * pairs


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
