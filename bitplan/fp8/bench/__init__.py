"""The FP8 layer benchmark, its report, and a policy confirmed on whole blocks."""
