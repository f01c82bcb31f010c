"""Which block gets which precision during training: pure decisions over statistics."""
