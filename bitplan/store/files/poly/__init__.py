"""Poly's network JSON."""
