"""Products with packed weights: fused kernels for GPUs, and for CPUs."""
