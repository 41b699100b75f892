"""Microbenchmarks: each kernel of nwor_kernels against what else does its work, in one run."""
