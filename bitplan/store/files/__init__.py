"""Containers of tensors: one module for each kind of file, one view of them all.

A model for another engine is written by `store.export`. A new kind of file is a `Container` (tensor_file.py) in a
module such as gguf_tensors.py, and a line in `CONTAINERS` (open_files.py). How its bytes lie may have a module of its
own (gguf.py, safetensors.py).
"""
