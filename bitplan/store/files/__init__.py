"""Containers of tensors: one module for each kind of file, one view of them all."""
