"""Packed checkpoints of any architecture: loaded, saved, known to transformers; language models, opened."""
