"""DRAM bytes of each cell, measured by the GPU's counters and predicted by the byte model."""
