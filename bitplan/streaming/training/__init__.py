"""Training streamed weights on the host: AdamW with its loops, gradients, state."""
