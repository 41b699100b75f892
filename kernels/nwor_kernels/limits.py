"""Sizes that the kernels take. Imports nothing, so a prediction can ask too."""

MAX_QUERY_LEN = 16
"""Longest window: k = 15 drafts and the certain first token."""

MAX_HEAD_DIM = 512

RECORD_ROWS = 16
"""Gated delta nets: most tokens of a window, rows of a ring. Tensor cores multiply 16 at least."""


def unsupported_heads(*dims: int) -> str | None:
    """The fallback reason of the first head size that the kernels do not serve; None if all fit."""
    strange = (dim for dim in dims if dim > MAX_HEAD_DIM or dim % 8)
    return next((f"head_dim_{dim}" for dim in strange), None)


def unsupported_window(tokens: int) -> str | None:
    """The fallback reason of a window with that many tokens a request; None if it fits."""
    return f"window_of_{tokens}_tokens" if tokens > MAX_QUERY_LEN else None
