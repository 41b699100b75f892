"""Intervals, robust locations, paired ratios, corrections and trends: pure functions on numbers."""
