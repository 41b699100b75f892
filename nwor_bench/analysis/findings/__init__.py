"""Findings: weaknesses of a run's numbers, each with what to do about it, by subject. Pure."""
