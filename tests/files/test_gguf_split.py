"""A model split over GGUF files is read whole, from any of its parts, or refused by the name of what is missing."""

from __future__ import annotations

import shutil

import gguf
import numpy as np
import pytest
import torch

from bitplan.base.errors import FileFormatError
from bitplan.cli import run
from bitplan.files.engines.gguf import write_parts
from bitplan.files.open_files import open_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.files.tensor_file import TensorSpec

NAMES = ["a.weight", "b.weight", "c.weight", "d.weight", "e.weight"]
PARTS = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def split(tmp_path):
    """Five tensors in three parts, as gguf-py splits them."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_context_length(64)
    for number, name in enumerate(NAMES):
        writer.add_tensor(name, np.full((2, 32), float(number), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == PARTS
    return tmp_path


@pytest.mark.parametrize("part", PARTS)
def test_all_parts_are_read_from_any_of_them(split, part):
    with open_tensors(split / part) as file:
        assert sorted(file.specs) == NAMES
        assert [float(file.read_float(name)[0, 0]) for name in NAMES] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_split_model_is_quantized_into_one_file(split):
    quantize_file(split / PARTS[0], split / "out.gguf", "q8_0_gguf")
    with open_tensors(split / "out.gguf") as file:
        assert sorted(file.specs) == NAMES
        assert not any(key.startswith("split.") for key in file.file.metadata)
        assert file.file.metadata["general.architecture"].value == "llama"
        assert file.read_float("e.weight").tolist()[0][0] == pytest.approx(4.0, rel=1e-3)


def test_parts_of_two_runs_are_not_one_model_and_the_same_run_gives_the_same_bytes(tmp_path):
    def write(folder, number):
        folder.mkdir()
        promises = [TensorSpec.of(name, (512, 1024), dtype=torch.float32) for name in "ab"]
        with write_parts(folder / "m.gguf", promises, {}, 2**20) as writer:
            for name in "ab":
                writer.write(name, torch.full((512, 1024), float(number)))
        return [path.read_bytes() for path in writer.paths]

    first, second, third = (write(tmp_path / str(place), number) for place, number in enumerate((1, 1, 2)))
    assert first == second
    with open_tensors(tmp_path / "0" / "m-00001-of-00002.gguf") as file:
        assert "split.run" not in file.metadata
    (tmp_path / "0" / "m-00002-of-00002.gguf").write_bytes(third[1])
    for part in (1, 2):
        with pytest.raises(FileFormatError, match=r"m-00002-of-00002.gguf: is of another run than 'm-00001-of-00002"):
            open_tensors(tmp_path / "0" / f"m-0000{part}-of-00002.gguf")


def test_a_missing_or_foreign_part_is_named(split, capsys):
    (split / PARTS[1]).rename(split / "away.gguf")
    with pytest.raises(FileFormatError, match=r"split into 3 parts, and 'm-00002-of-00003.gguf' is missing"):
        open_tensors(split / PARTS[0])
    assert run(["inspect", str(split / PARTS[2])]) == 2
    assert "m-00002-of-00003.gguf" in capsys.readouterr().err
    shutil.copy(split / PARTS[2], split / PARTS[1])
    with pytest.raises(FileFormatError, match=r"m-00002-of-00003.gguf: its metadata does not say .* part 2 of 3"):
        open_tensors(split / PARTS[0])
    with pytest.raises(FileFormatError, match="says part 2 of 3, which its name must say too"):
        open_tensors(split / "away.gguf")
