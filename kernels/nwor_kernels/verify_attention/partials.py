"""What a launch of the verification kernel writes beside its output: partial results. Pure.

The same arithmetic as `division.py`'s on the device, on the host's integers: a byte model needs
it, since every partial result ends up in DRAM (the next layer's weights push it out of L2).
"""

from collections.abc import Iterator, Sequence

from nwor_kernels.verify_attention.tuning import MAX_PARTS, LaunchShape


def partial_bytes(
    seq_lens: Sequence[int], staged: Sequence[int], kv_heads: int, shape: LaunchShape, programs: int
) -> int:
    """Bytes of partial results that one launch (one layer) leaves in its workspace.

    Args:
        seq_lens: tokens of each request, those of its window included.
        staged: staged tokens of each; 0 for a request without a window.
        kv_heads: K/V heads.
        shape: of the launch; models without a sliding window.
        programs: programs that were launched, at most `shape.programs`.
    """
    tile = 4 * shape.rows * (shape.dim + 2)  # float32: accumulator, maximum and sum of each row
    steps = [_steps(*pair, shape.block_n) for pair in zip(seq_lens, staged, strict=True)]
    return tile * sum(_parts(steps, kv_heads * shape.row_tiles, shape.min_tiles, programs))


def _steps(seq_len: int, staged: int, block_n: int) -> int:
    """Steps of one pair: its context's, and the window's."""
    return -(-max(seq_len - staged, 0) // block_n) + 1 if staged else 0


def _parts(steps: Sequence[int], pairs: int, min_steps: int, programs: int) -> Iterator[int]:
    """Programs that share each pair; a pair that one program has alone leaves nothing."""
    part, multiple = _cut(steps, pairs, min_steps, programs)
    at = 0
    for of_request in steps:
        slots = -(-of_request // multiple) * multiple
        for _ in range(pairs if slots else 0):
            shared_by = (at + slots - 1) // part - at // part + 1
            if shared_by > 1:
                yield shared_by
            at += slots


def _cut(steps: Sequence[int], pairs: int, min_steps: int, programs: int) -> tuple[int, int]:
    """`division.cut`: steps a program, of which a pair's are rounded up to a multiple."""
    all_steps, most = sum(steps) * pairs, max(steps)
    busy_pairs = sum(1 for n in steps if n) * pairs
    least = max(-(-most // MAX_PARTS), min_steps)
    part = max(-(-all_steps // programs), least)
    aligned = -(-most // max(programs // max(busy_pairs, 1), 1))
    aligned = max(min(aligned, -(-all_steps // max(programs - busy_pairs, 1))), least)
    is_cheap = busy_pairs <= programs and aligned <= part + part // 4 + 1
    return (aligned, aligned) if is_cheap else (part, 1)
