"""Comparison of two runs, BASE and NEW: preconditions, changes of each cell, verdicts."""
