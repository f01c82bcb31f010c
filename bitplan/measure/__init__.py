"""Numbers for the plan: what a format costs a model, with the error of each figure."""
