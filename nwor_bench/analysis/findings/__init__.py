"""Findings: weaknesses of a run's numbers, with remedies."""
