"""encode and decode, faster: twins for CPUs (numba) and GPUs (Triton), and the dispatcher."""
