"""Lets transformers read a GGUF file once: it opens the file for the config, the tokenizer and the weights.

gguf's reader takes a slice of a memory map for every token of the vocabulary, and each runs Python code of NumPy's;
of a plain array over the same bytes it does not. Opening SmolLM2-135M took 35 s of CPU time, and takes 24.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_replacing = threading.RLock()


@contextmanager
def one_gguf_reader() -> Iterator[None]:
    """Within the block, readers of one file that gguf makes are one. Threads come into it one after the other."""
    import gguf
    from gguf.gguf_reader import GGUFReader  # not the name that is replaced

    class PlainReader(GGUFReader):  # type: ignore[misc]
        data: Any

        def _get(self, *args: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **options)

    made: dict[Path, Any] = {}

    def reader(path: Any, *args: Any, **options: Any) -> Any:
        if args or options:
            return PlainReader(path, *args, **options)
        place = Path(path).resolve()
        if place not in made:
            made[place] = PlainReader(path)
        return made[place]

    with _replacing:
        before = gguf.GGUFReader
        try:
            gguf.GGUFReader = reader  # transformers imports it by name when it reads a file
            yield
        finally:
            gguf.GGUFReader = before
