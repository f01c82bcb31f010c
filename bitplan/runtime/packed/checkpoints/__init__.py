"""Packed checkpoints of any architecture: loaded, saved, and known to transformers."""
