"""Kernels of nwor-bench, one folder each: `reference.py` defines in torch what `kernel.py` does."""
