"""Writes the accepted rows of a window to the caches of all target layers."""
