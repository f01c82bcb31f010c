"""GGUF's blocks with their own scales: bytes, the search for scales, and its twins for CPUs and GPUs."""
