"""Instruments around a worker's windows: bytes, launches, phases, NVTX ranges, K/V rows."""
