"""FP8 or BF16, layer by layer: reports of measured times, policies made from them, and their answers."""
