"""FP8 or BF16, layer by layer: reports of measured times, policies made of them, and what they answer."""
