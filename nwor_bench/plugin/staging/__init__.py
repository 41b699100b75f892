"""Staging as both runners share it: a window's life, the target's layers, the refusals."""
