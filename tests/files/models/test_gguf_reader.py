"""transformers reads a GGUF file through one reader, which gives what gguf's own gives."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from bitplan.packed.checkpoints.causal_lm import one_gguf_reader

gguf = pytest.importorskip("gguf")


def test_a_file_is_read_once_with_the_fields_and_tensors_of_ggufs_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token {at}" for at in range(9)])
    writer.add_tensor("weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before = gguf.GGUFReader
    with one_gguf_reader():
        found = gguf.GGUFReader(path)
        assert gguf.GGUFReader(str(path)) is found
        assert not isinstance(found.data, np.memmap)
    assert gguf.GGUFReader is before
    plain = before(path)
    assert {name: field.contents() for name, field in found.fields.items()} == {
        name: field.contents() for name, field in plain.fields.items()
    }
    assert np.array_equal(found.tensors[0].data, plain.tensors[0].data)


def test_ggufs_reader_is_back_after_an_error_and_after_two_threads() -> None:
    before, found, is_inside = gguf.GGUFReader, [], threading.Event()

    def read() -> None:
        is_inside.wait()
        with one_gguf_reader():
            found.append(gguf.GGUFReader)

    def fail() -> None:
        with one_gguf_reader():
            is_inside.set()
            other.join(0.2)
            assert not found  # it waits
            raise RuntimeError("broken")

    other = threading.Thread(target=read)
    other.start()
    with pytest.raises(RuntimeError, match="broken"):
        fail()
    other.join()
    assert len(found) == 1
    assert gguf.GGUFReader is before
