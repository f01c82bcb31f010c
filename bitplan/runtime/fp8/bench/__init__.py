"""The FP8 layer benchmark, and the confirmation of a policy on whole blocks."""
