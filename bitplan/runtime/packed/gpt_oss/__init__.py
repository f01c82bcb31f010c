"""gpt-oss checkpoints, in three layouts, as packed models."""
