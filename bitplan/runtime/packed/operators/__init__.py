"""Packed products as operators that torch.compile and torch.export know."""
