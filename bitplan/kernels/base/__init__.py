"""What every kernel stands on: compiling and launching, vectors, arithmetic of numbers."""
