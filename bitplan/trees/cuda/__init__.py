"""Growing trees on a CUDA GPU; imported when `device="cuda"` asks for it, for it needs torch and Triton."""
