"""Bytes at rest: weights with their versions, whole models, and the files they live in."""
