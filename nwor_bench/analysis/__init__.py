"""From records to verdicts: invariants, parity, findings and comparisons."""
