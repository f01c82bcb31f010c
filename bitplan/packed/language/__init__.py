"""Language models: opened from any file, run, timed, and judged by perplexity and distance."""
