"""Folders that other libraries quantized: one module a scheme, each with `list_weights(folder)`."""
