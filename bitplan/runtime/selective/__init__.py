"""Selective precision: a policy that watches a stream and decides its formats."""
