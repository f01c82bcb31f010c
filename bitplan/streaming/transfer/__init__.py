"""Devices, host memory, slots and copies, and how fast and how far ahead blocks may be moved."""
