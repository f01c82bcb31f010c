"""encode and decode, faster: versions for CPUs (numba) and GPUs (Triton), and the dispatcher."""
