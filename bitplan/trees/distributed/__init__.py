"""One model from rows that lie in several processes."""
