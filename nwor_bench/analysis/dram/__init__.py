"""DRAM bytes of each cell: counted by the GPU, and predicted by the byte model."""
