"""Linear layers in FP8, and what they keep of their weights."""
