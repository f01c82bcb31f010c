"""Models of boosted trees in files: our JSON, and LightGBM's text."""
