"""Attention of a window's queries over committed and staged K/V."""
