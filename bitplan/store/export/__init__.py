"""Models written for other engines: a table of targets, one module for each."""
