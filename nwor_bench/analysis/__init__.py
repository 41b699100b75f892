"""From records to verdicts: statistics, invariants, parity, findings and comparisons."""
