"""Language models: run, timed, and judged by perplexity and distance."""
