"""Weights of these tests are small, and are encoded as large ones are."""

from tests.compiled_loops import compiled_loops as compiled_loops
