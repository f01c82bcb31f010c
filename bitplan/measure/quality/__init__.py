"""What a format costs a model: perplexity, distance from a reference, errors of weights."""
