"""FP8 casts and products of one matrix."""
