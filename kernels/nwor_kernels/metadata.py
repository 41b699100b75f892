"""Per-layer metadata that stage writes and commit checks: int32 [layers, 2]."""

STAGED_COUNT = 0
"""Column 0: rows of this window in the layer's staging buffer."""

ERROR_FLAG = 1
"""Column 1: bitwise or of the ERROR_* flags; 0 when the layer is sound."""

ERROR_OVERFLOW = 1
"""More rows than the staging buffer holds; nothing was staged."""

ERROR_ROW_RANGE = 2
"""A row index past the end of key or value; nothing was staged."""

ERROR_COUNT_MISMATCH = 4
"""The layer staged another number of rows than the window has; nothing was committed."""

ERROR_SLOT_RANGE = 8
"""A slot past the end of the cache; nothing was committed."""

ERROR_NAMES = {
    ERROR_OVERFLOW: "overflow",
    ERROR_ROW_RANGE: "row_range",
    ERROR_COUNT_MISMATCH: "count_mismatch",
    ERROR_SLOT_RANGE: "slot_range",
}
"""Each flag's name in a fallback reason."""


def error_names(flags: int) -> str:
    """The set flags as words joined by `+`, e.g. `overflow+row_range`; empty for 0."""
    return "+".join(name for flag, name in ERROR_NAMES.items() if flags & flag)
