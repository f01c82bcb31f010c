"""Products with packed weights, fused: kernels with their launchers, for GPUs and CPUs."""
