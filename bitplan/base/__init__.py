"""What every part of bitplan may use: errors, files written whole, documents read strictly, optional libraries,
fingerprints, timing in turns, and calls from compiled code. It imports no other part."""
