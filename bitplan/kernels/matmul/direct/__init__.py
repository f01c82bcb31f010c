"""Products over 4-bit codes that go from memory straight to the lanes that decode them."""
