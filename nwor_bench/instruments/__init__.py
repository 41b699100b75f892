"""Looking inside a run: named ranges for profilers, hardware counters, Nsight's tools.

The ranges (NVTX, domain `nwor-bench`) are what everything else here joins by; `nvtx_ranges` says
what each of them is called and what its payload counts.
"""
