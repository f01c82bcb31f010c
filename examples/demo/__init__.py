"""The demo: `python -m examples.demo` from the root of a clone (`make demo`)."""
