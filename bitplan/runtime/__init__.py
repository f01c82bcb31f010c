"""Models that run on packed weights: linears, experts, loading, and rewriting a model to a plan."""
