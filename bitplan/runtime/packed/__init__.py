"""Models that run on packed weights."""
