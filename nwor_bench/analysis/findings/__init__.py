"""What weakens a run's numbers, and what to do about it."""
