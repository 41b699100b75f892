"""Microbenchmarks: each kernel of nwor_kernels against its peers."""
