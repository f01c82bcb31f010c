"""Compiled loops and launches: numba's compiler and threads, vectors and atomics, Triton kernels started cheaply."""
