"""FP8 casts and products of all experts of a layer, in one launch each."""
