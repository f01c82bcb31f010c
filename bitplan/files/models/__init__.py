"""Whole models: weights with their versions, saved and loaded."""
