"""Folders that GPTQ, AWQ, compressed-tensors and others quantized: one reader each."""
