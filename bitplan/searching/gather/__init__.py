"""What formats cost a model: statistics of its text, rounded weights, distances of plans."""
