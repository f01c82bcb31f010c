"""Training streamed weights on the host."""
