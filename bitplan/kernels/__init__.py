"""The same numbers, faster."""

from bitplan.formats import decode, encode

__all__ = ["decode", "encode"]
