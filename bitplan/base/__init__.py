"""What every part of bitplan may use: errors, files written whole, documents read strictly, optional libraries,
versions, timing in turns, and calls from compiled code. It imports no other part."""

__version__ = "0.1.0"
