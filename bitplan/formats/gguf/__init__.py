"""GGUF's formats whose blocks hold more than codes and one scale: their bytes, and how scales are searched."""
