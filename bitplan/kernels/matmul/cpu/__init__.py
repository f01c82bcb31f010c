"""Loops of a CPU's products with packed weights."""
