"""A window's own K/V, merged into attention over the committed tokens."""
