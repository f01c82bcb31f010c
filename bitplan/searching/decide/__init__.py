"""Choosing by evidence alone: no torch, no model."""
