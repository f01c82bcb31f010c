"""`bitplan demo`, part by part."""
