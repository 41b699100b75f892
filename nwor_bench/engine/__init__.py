"""One live vLLM: checked arguments, start, mode switches, batches, counters and cache read back."""
