"""Observation of machine and GPU: environment, conditions, NVTX ranges, counters, Nsight's tools.

Profiles are joined to windows by the NVTX ranges of the domain `nwor-bench`; `nvtx_ranges` lists
their names and payloads.
"""
