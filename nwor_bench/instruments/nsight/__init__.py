"""Nsight Systems and Nsight Compute: command lines, and what their reports say by window."""
