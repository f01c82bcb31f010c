"""Containers of tensors: one module for each kind of file, one view of them all.

A new kind of file, to read or to export, is a `Container` (tensor_file.py) in a module such as gguf_tensors.py, and a
line in `CONTAINERS` (open_files.py). How its bytes lie may have a module of its own (gguf.py, safetensors.py).
"""
