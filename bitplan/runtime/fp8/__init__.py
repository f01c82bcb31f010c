"""Adaptive FP8: a policy applied to a model."""
