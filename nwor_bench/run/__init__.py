"""From a plan to a run folder: prepare, warm-up, gate, timed blocks, reports; sweeps of runs."""
