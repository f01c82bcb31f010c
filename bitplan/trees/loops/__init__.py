"""The compiled loops of boosted trees."""
