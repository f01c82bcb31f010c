"""Objectives beside the common ones: quantiles, heavy tails, amounts that are mostly zero, ranking."""
