"""Nsight Systems and Nsight Compute around a sweep: command lines, and their reports by window."""
