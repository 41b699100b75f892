"""Stage: copy the draft tokens' K/V rows out of a layer's activations. Torch reference."""

from torch import Tensor

from nwor_kernels.metadata import ERROR_FLAG, ERROR_OVERFLOW, ERROR_ROW_RANGE, STAGED_COUNT


def stage_kv_cache_reference(
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    layer_metadata: Tensor,
) -> None:
    """Copy `key[rows[i]]` and `value[rows[i]]` to row i of one layer's staging buffers.

    Args:
        key: [num_tokens, kv_heads, head_dim], any float dtype, any strides.
        value: [num_tokens, kv_heads, value_head_dim].
        rows: [num_staged] int64, the draft tokens' rows in the batch; a negative entry is
            padding: its staging row stays as it was and does not count.
        staged_key: [capacity, kv_heads, head_dim], written in rows 0..num_staged-1.
        staged_value: [capacity, kv_heads, value_head_dim], likewise.
        layer_metadata: [2] int32, overwritten with (staged count, error flags).

    On overflow or an out-of-range row nothing is copied, the count is 0 and the flag is set:
    the caller must write the window directly.
    """
    layer_metadata.zero_()
    if rows.numel() > staged_key.shape[0]:
        layer_metadata[ERROR_FLAG] = ERROR_OVERFLOW
        return
    if rows.numel() and int(rows.max()) >= min(key.shape[0], value.shape[0]):
        layer_metadata[ERROR_FLAG] = ERROR_ROW_RANGE
        return
    real = (rows >= 0).nonzero(as_tuple=True)[0]
    source = rows[real]
    staged_key[real] = key[source]
    staged_value[real] = value[source]
    layer_metadata[STAGED_COUNT] = real.numel()
