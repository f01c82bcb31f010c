"""The verbs, one function each."""
