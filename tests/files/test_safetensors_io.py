"""Our safetensors against the real library both ways, every malformed header, and interrupted writes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from bitplan.base import records
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files import safetensors as safetensors_io
from bitplan.files.safetensors import SafetensorsFile, open_checkpoint, write_safetensors
from bitplan.formats.elements import torch_dtype
from tests.processes import Program

# The library's torch loader knows no F4 and E8M0 tag, although it writes them.
DTYPES = {tag: torch_dtype(name) for tag, name in safetensors_io.DTYPES.items()}
LOADABLE = [tag for tag in DTYPES if tag not in ("F4", "F8_E8M0")]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every byte pattern in turn; bools stay 0 and 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) * 37 % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    with write_safetensors(path, [(name, t.dtype, t.shape) for name, t in tensors.items()], metadata) as writer:
        for name in writer.order:
            writer.write(name, tensors[name])
    return path


def save_header(path: Path, header: object, payload: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def every_kind() -> dict[str, torch.Tensor]:
    tensors = {f"{tag}.weight": sample(dtype, 3, 4) for tag, dtype in DTYPES.items()}
    return tensors | {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 5),
        "hollow": torch.empty(3, 0, 2, dtype=torch.int64),
        "schräg/層 🙂\n\"'": torch.arange(3),
        "": torch.arange(2, dtype=torch.uint8),
    }


# --- both ways -------------------------------------------------------------------------------


def test_read_back_what_was_written(tmp_path):
    tensors = every_kind()
    path = save(tmp_path / "a.safetensors", tensors, {"format": "pt", "ключ": "значение"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt", "ключ": "значение"}
        assert set(file.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert same(file.read(name), tensor), name
            result = file.tensors[name]
            assert (result.torch_dtype, result.shape) == (tensor.dtype, tuple(tensor.shape))
            assert result.nbytes == tensor.nbytes
            assert result.start % max(tensor.itemsize, 1) == 0


def test_library_reads_ours(tmp_path):
    tensors = {name: t for name, t in every_kind().items() if not name.startswith(("F4.", "F8_E8M0."))}
    path = save(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == set(tensors)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert same(file.get_tensor("F64.weight"), tensors["F64.weight"])


def test_library_parses_ours_with_four_bit_and_e8m0(tmp_path):
    path = save(tmp_path / "a.safetensors", {tag: sample(DTYPES[tag], 2, 3) for tag in ("F4", "F8_E8M0")})
    result = {name: (info["dtype"], info["shape"]) for name, info in safetensors.deserialize(path.read_bytes())}
    assert result == {"F4": ("F4", [2, 6]), "F8_E8M0": ("F8_E8M0", [2, 3])}


def test_we_read_the_librarys(tmp_path):
    tensors = every_kind()
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, {"who": "library"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"who": "library"}
        assert list(file.tensors.values()) == sorted(file.tensors.values(), key=lambda e: (e.start, e.nbytes))
        assert all(same(file.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("tag", LOADABLE)
def test_same_bytes_as_the_library_for_one_dtype(tag, tmp_path):
    tensors = {name: sample(DTYPES[tag], 2, 3) for name in ("b", "a", "c.10", "c.9", "ä")}
    save(tmp_path / "ours", tensors, {"format": "pt"})
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_no_tensors_at_all(tmp_path):
    path = save(tmp_path / "a.safetensors", {}, {"only": "metadata"})
    assert safetensors.torch.load_file(path) == {}
    with SafetensorsFile(path) as file:
        assert file.tensors == {}
        assert file.metadata == {"only": "metadata"}


def test_same_input_gives_same_bytes_in_any_order(tmp_path):
    tensors, metadata = every_kind(), {"b": "1", "a": "2"}
    one = save(tmp_path / "one", tensors, metadata)
    two = save(tmp_path / "two", dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert one.read_bytes() == two.read_bytes()
    assert int.from_bytes(one.read_bytes()[:8], "little") % 8 == 0


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", DTYPES)
def test_rows(tag, tmp_path):
    tensor = sample(DTYPES[tag], 7, 2, 3)
    with SafetensorsFile(save(tmp_path / "a", {"x": tensor})) as file:
        for start, stop in [(0, 7), (0, 0), (2, 5), (6, 7), (7, 7)]:
            assert same(file.read_rows("x", start, stop), tensor.view(torch.uint8)[start:stop].view(DTYPES[tag]))


def test_rows_of_tensors_without_elements(tmp_path):
    with SafetensorsFile(save(tmp_path / "a", {"x": torch.empty(0, 5), "y": torch.empty(3, 0)})) as file:
        assert file.read_rows("x", 0, 0).shape == (0, 5)
        assert file.read_rows("y", 1, 3).shape == (2, 0)


@pytest.mark.parametrize("span", [(-1, 2), (0, 8), (5, 4), (8, 8)])
def test_rows_out_of_range(span, tmp_path):
    with (
        SafetensorsFile(save(tmp_path / "a", {"x": torch.zeros(7)})) as file,
        pytest.raises(StoreError, match=f"'x' has 7 rows; rows {span[0]} to {span[1]} are not among them"),
    ):
        file.read_rows("x", *span)


def test_questions_a_file_cannot_answer(tmp_path):
    path = save(tmp_path / "a", {"wq.weight": torch.tensor(1.0)})
    with SafetensorsFile(path) as file:
        with pytest.raises(StoreError, match=r"no tensor 'wk.weight'; did you mean 'wq.weight'"):
            file.read("wk.weight")
        with pytest.raises(StoreError, match="is a scalar and has no rows"):
            file.read_rows("wq.weight", 0, 1)
    with pytest.raises(StoreError, match=r"tensor 'wq.weight' was asked for after the file was closed"):
        file.read("wq.weight")


def test_tensors_are_owned_and_independent(tmp_path):
    path = save(tmp_path / "a", {"x": torch.arange(4)})
    with SafetensorsFile(path) as file:
        file.read("x").fill_(9)
        assert file.read("x").tolist() == [0, 1, 2, 3]


def test_file_cut_after_it_was_opened(tmp_path):
    path = save(tmp_path / "a", {"x": torch.arange(1000)})
    with SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(
            FileFormatError, match=r"a: tensor 'x' needs 8000 bytes .* ends after 7992 .* copy or downl"
        ):
            file.read("x")


def test_positioned_reads_are_not_needed(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    tensors = every_kind()
    with SafetensorsFile(save(tmp_path / "a", tensors)) as file:
        assert all(same(file.read(name), tensor) for name, tensor in tensors.items())


# --- malformed files -------------------------------------------------------------------------

MALFORMED = {
    "not an object": (b"[]", b"", "header is not a UTF-8 JSON object"),
    "leading space": (b" {}", b"", "header is not a UTF-8 JSON object"),
    "utf-16": ('{"a":1}'.encode("utf-16-le"), b"", "header is not a UTF-8 JSON object"),
    "not JSON": (b"{]", b"", "not valid JSON"),
    "bad UTF-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "duplicate name": (b'{"a":{},"a":{}}', b"", "key 'a' appears twice"),
    "deep nesting": (b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
    "digits without end": (b'{"a":' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    "NaN": (b'{"a":NaN}', b"", "NaN is not a JSON number"),
    "half a surrogate pair": (b'{"\\ud800":{}}', b"", "a string with half of a surrogate pair"),
    "metadata not an object": ({"__metadata__": []}, b"", "__metadata__ must be an object of strings, got list"),
    "metadata not a string": ({"__metadata__": {"a": 1}}, b"", "__metadata__ 'a' must be a string, got 1"),
    "metadata not Unicode": ({"__metadata__": {"a": "\ud800"}}, b"", "a string with half of a surrogate pair"),
    "unknown dtype": ({"a": entry("F31")}, bytes(4), "dtype 'F31' is not one of BOOL, U8"),
    "dtype not a string": ({"a": entry(["F32"])}, bytes(4), "is not one of BOOL, U8"),
    "shape not a list": ({"a": entry(shape=1)}, bytes(4), "shape must be at most 64 integers from 0, got 1"),
    "negative size": ({"a": entry(shape=[-1])}, bytes(4), r"shape must be .* got \[-1\]"),
    "fractional size": ({"a": entry(shape=[1.0])}, bytes(4), r"shape must be .* got \[1.0\]"),
    "boolean size": ({"a": entry(shape=[True])}, bytes(4), r"shape must be .* got \[True\]"),
    "huge size": ({"a": entry(shape=[2**64])}, bytes(4), "shape must be"),
    "rank 65": ({"a": entry(shape=[1] * 65)}, bytes(4), "shape must be at most 64"),
    "size overflows": ({"a": entry(shape=[2**40, 2**40])}, bytes(4), "no F32 tensor can have shape"),
    "overflow hidden by zero": ({"a": entry(shape=[0, 2**40, 2**40], offsets=[0, 0])}, b"", "no F32 tensor can have"),
    "odd number of fours": ({"a": entry("F4", [2, 3], [0, 3])}, bytes(3), r"no F4 tensor can have shape \[2, 3\]"),
    "scalar four": ({"a": entry("F4", [], [0, 1])}, bytes(1), r"no F4 tensor can have shape \[\]"),
    "offsets backwards": ({"a": entry(offsets=[4, 0])}, bytes(4), r"data_offsets must be \[begin, end\] within the 4"),
    "offsets past the end": ({"a": entry(offsets=[0, 5])}, bytes(4), "within the 4 payload bytes"),
    "offsets far past the end": ({"a": entry(offsets=[0, 2**70])}, bytes(4), "within the 4 payload bytes"),
    "three offsets": ({"a": entry(offsets=[0, 4, 4])}, bytes(4), "data_offsets must be"),
    "offsets not integers": ({"a": entry(offsets=[0, "4"])}, bytes(4), "data_offsets must be"),
    "wrong size": (
        {"a": entry(shape=[2])},
        bytes(4),
        r"F32 of shape \[2\] takes 8 bytes, data_offsets \[0, 4\] give it 4",
    ),
    "overlap": ({"a": entry(), "b": entry()}, bytes(4), "tensor 'b' overlaps the tensor before it"),
    "overlap by half": ({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6), "tensor 'b' overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=[5, 9])}, bytes(9), "tensor 'b' leaves a hole before it: starts at"),
    "hole at the start": ({"a": entry(offsets=[4, 8])}, bytes(8), "tensor 'a' leaves a hole before it"),
    "bytes after the end": ({"a": entry()}, bytes(5), "cut short or has bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_header_is_refused(case, tmp_path):
    header, payload, message = MALFORMED[case]
    path = save_header(tmp_path / "bad.safetensors", header, payload)
    with pytest.raises(FileFormatError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the header length takes 8 bytes, the file has 0"),
        (b"\1\0\0", "the header length takes 8 bytes, the file has 3"),
        (bytes(8), "the header is not a UTF-8 JSON object"),
        ((100).to_bytes(8, "little") + b"{}", "the header says it takes 100 bytes, the file has 2"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "the header says it takes 18446744073709551615 bytes"),
        (b"PK\x03\x04" + bytes(60), "bitplan never opens pickles"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9" + bytes(60), "bitplan never opens pickles"),
        (b"GGUF\3\0\0\0" + bytes(60), "is a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_not_a_safetensors_file(content, message, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        SafetensorsFile(path)


def test_header_limit_holds_even_if_the_file_is_large_enough(tmp_path):
    path = tmp_path / "sparse.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 2**40)  # takes no room on disk
    with pytest.raises(FileFormatError, match="the format allows 100000000"):
        SafetensorsFile(path)


@pytest.mark.parametrize("name", ["missing.safetensors", "folder"])
def test_no_such_file(name, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileFormatError, match=r"no such file|is a folder, and a regular file"):
        SafetensorsFile(tmp_path / name)


# --- writing ---------------------------------------------------------------------------------


def test_chunks_views_and_buffers(tmp_path):
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    conjugate = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    entries = [
        ("w", torch.float32, (6, 4)),
        ("n", torch.float32, (2,)),
        ("b", torch.uint8, (3,)),
        ("e", torch.int8, (0,)),
    ]
    with write_safetensors(tmp_path / "a", [*entries, ("c", torch.complex64, (2,))]) as writer:
        assert writer.order == ("c", "n", "w", "b", "e")
        writer.write("c", conjugate)
        writer.write("n", conjugate.imag)  # carries a lazy minus sign
        for column in wide.T.split(4):
            writer.write_chunk("w", column)
        writer.write_chunk("b", b"\1")
        writer.write_chunk("b", memoryview(b"\2\3"))  # and "e", which has no bytes, is not written at all
    with SafetensorsFile(tmp_path / "a") as file:
        assert torch.equal(file.read("w"), wide.T)
        assert file.read("b").tolist() == [1, 2, 3]
        assert file.read("c").tolist() == [1 - 2j, 3 + 4j]
        assert file.read("n").tolist() == [-2, 4]
        assert file.read("e").shape == (0,)


X, Y = torch.zeros(2), torch.ones(3, dtype=torch.float16)
MISUSE = {
    "unknown": (lambda w: w.write("z", Y), "tensor 'z' came but was not promised"),
    "twice": (lambda w: [w.write("x", X), w.write("x", X)], "write.. came with 8 after 8"),
    "a chunk too many": (lambda w: [w.write("x", X), w.write_chunk("x", X[:1])], "8 came and 4 more are too many"),
    "wrong dtype": (lambda w: w.write("x", X.double()), "promised as torch.float32, came as torch.float64"),
    "wrong dtype in a chunk": (lambda w: w.write_chunk("x", Y), "promised as torch.float32, came as torch.float16"),
    "wrong shape": (lambda w: w.write("x", X[:1]), r"promised as \(2,\), came as \(1,\)"),
    "too few bytes": (lambda w: w.write("x", b"1234"), "promised with 8 bytes, write.. came with 4 after 0"),
    "too many bytes": (lambda w: w.write_chunk("x", bytes(9)), "8 bytes, 0 came and 9 more are too many"),
    "too many in chunks": (lambda w: [w.write_chunk("x", bytes(5)) for _ in "12"], "5 came and 5 more are too many"),
    "whole after a chunk": (lambda w: [w.write_chunk("x", X[:1]), w.write("x", X)], "came with 8 after 4"),
    "unfinished": (lambda w: w.write_chunk("x", X[:1]), "'x' was promised with 8 bytes, 4 came; the file was not"),
    "left out": (lambda w: w.write("x", X), "'y' was promised with 6 bytes, 0 came; the file was not written"),
    "caller fails": (lambda w: [w.write("x", X), 1 / 0], "division by zero"),
}


def test_tensors_may_come_in_any_order(tmp_path):
    files = []
    for names in ("xy", "yx"):
        files.append(tmp_path / names)
        with write_safetensors(files[-1], [("x", torch.float32, (2,)), ("y", torch.float16, (3,))]) as writer:
            for name in names:
                writer.write(name, X if name == "x" else Y)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("case", MISUSE)
@pytest.mark.parametrize("old", [None, b"old content"])
def test_misuse_leaves_the_target_untouched(case, old, tmp_path):
    act, message = MISUSE[case]
    path = tmp_path / "a.safetensors"
    if old is not None:
        path.write_bytes(old)
    with (
        pytest.raises((StoreError, ZeroDivisionError), match=message),
        write_safetensors(path, [("x", torch.float32, (2,)), ("y", torch.float16, (3,))]) as writer,
    ):
        act(writer)
    assert [p.name for p in tmp_path.iterdir()] == ([] if old is None else [path.name])
    assert old is None or path.read_bytes() == old


@pytest.mark.parametrize(
    ("entries", "metadata", "message"),
    [
        ([("a", torch.int8, (1,))] * 2, {}, "tensor name 'a' is taken"),
        ([("__metadata__", torch.int8, (1,))], {}, "tensor name '__metadata__' is taken"),
        ([("\ud800", torch.int8, (1,))], {}, "taken or not valid Unicode"),
        ([("a", torch.complex128, (1,))], {}, "safetensors has no complex128; it has bool"),
        ([("a", torch.int8, (-1,))], {}, r"no torch.int8 tensor can have shape \(-1,\)"),
        ([("a", torch.int8, (1,) * 65)], {}, "no torch.int8 tensor can have shape"),
        ([("a", torch.float4_e2m1fn_x2, ())], {}, "no torch.float4_e2m1fn_x2 tensor can have shape"),
        ([], {"a": 1}, "__metadata__ 'a' must be a string"),
    ],
)
def test_entries_that_cannot_be_written(entries, metadata, message, tmp_path):
    with (
        pytest.raises((StoreError, FileFormatError), match=message),
        write_safetensors(tmp_path / "a", entries, metadata),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_is_too_long_is_not_written(tmp_path, monkeypatch):
    assert safetensors_io.MAX_HEADER_BYTES == 100_000_000
    monkeypatch.setattr(safetensors_io, "MAX_HEADER_BYTES", 1000)
    with (
        pytest.raises(StoreError, match=r"the header takes \d+ bytes, the format allows 1000"),
        write_safetensors(tmp_path / "a", [], {"a": "x" * 1000}),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import contextlib, errno, os, resource, signal, sys, torch
from gguf import GGMLQuantizationType
from bitplan.files.gguf import write_gguf
from bitplan.files.safetensors import write_safetensors
how, st_path, gguf_path = sys.argv[1:]
half = bytes(2**20)
writes = [
    lambda: write_safetensors(st_path, [("x", torch.uint8, (2**21,))]),
    lambda: write_gguf(gguf_path, [("x", GGMLQuantizationType.I8, (2**21,))], {}),
]
if how == "killed":
    with writes[0]() as st, writes[1]() as gg:
        for writer in (st, gg):
            writer.write_chunk("x", half)
        print("ready", flush=True)
        signal.pause()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 + 2**19, resource.RLIM_INFINITY))
for write in writes:
    try:
        with write() as writer:
            for _ in range(2):
                writer.write_chunk("x", half)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def interrupted_write(tmp_path: Path, how: str) -> tuple[Program, list[Path]]:
    paths = [tmp_path / "a.safetensors", tmp_path / "a.gguf"]
    for path in paths:
        path.write_bytes(b"old content")
    return Program(INTERRUPTED, how, *map(str, paths), folder=tmp_path), paths


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_killed_writer_leaves_the_old_files(tmp_path):
    program, paths = interrupted_write(tmp_path, "killed")
    program.wait_until(lambda: program.output == "ready\n")
    assert len(list(tmp_path.glob(".*.partial"))) == 2
    assert program.signal(signal.SIGKILL) == -signal.SIGKILL
    assert [path.read_bytes() for path in paths] == [b"old content"] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX limits")
def test_full_disk_leaves_the_old_files_and_nothing_else(tmp_path):
    program, paths = interrupted_write(tmp_path, "full")
    assert program.wait() == 0, program.errors
    assert program.output == "EFBIG\nEFBIG\n"
    assert [path.read_bytes() for path in paths] == [b"old content"] * 2
    assert sorted(tmp_path.iterdir()) == sorted(paths)


# --- checkpoints -----------------------------------------------------------------------------


def sharded(folder: Path, weight_map: object = None) -> Path:
    """Two shards, and an index which a test may replace."""
    save(folder / "model-1.safetensors", {"a": torch.zeros(2, 3)}, {"format": "pt", "shard": "1"})
    save(folder / "model-2.safetensors", {"b": torch.ones(4), "c": torch.tensor(5)}, {"format": "pt", "shard": "2"})
    good = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": 48}, "weight_map": good if weight_map is None else weight_map})
    )
    return index


def test_sharded_checkpoint(tmp_path):
    index = sharded(tmp_path)
    for path in (index, tmp_path, str(tmp_path)):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.shards == [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
            assert {name: file.name for name, file in checkpoint.weight_map.items()} == {
                "a": "model-1.safetensors",
                "b": "model-2.safetensors",
                "c": "model-2.safetensors",
            }
            assert checkpoint.tensors["a"].shape == (2, 3)
            assert checkpoint.metadata == {"format": "pt"}
            assert checkpoint.read("c").item() == 5
            assert checkpoint.read_rows("b", 1, 3).tolist() == [1, 1]
            with pytest.raises(StoreError, match="no tensor 'd' in this checkpoint"):
                checkpoint.read("d")


def test_single_file_checkpoint(tmp_path):
    path = save(tmp_path / "anything.safetensors", {"a": torch.zeros(2)}, {"k": "v"})
    (tmp_path / "._anything.safetensors").write_bytes(b"left by a file manager")
    for source in (path, tmp_path):
        with open_checkpoint(source) as checkpoint:
            assert (checkpoint.shards, checkpoint.metadata, list(checkpoint.tensors)) == ([path], {"k": "v"}, ["a"])


def test_shards_may_be_links_out_of_the_folder(tmp_path):
    """The Hugging Face cache keeps a snapshot as links to its blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    sharded(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    with open_checkpoint(snapshot) as checkpoint:
        assert sorted(checkpoint.tensors) == ["a", "b", "c"]


ONE, TWO = "model-1.safetensors", "model-2.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ([], "weight_map must be an object of tensor names to file names"),
        ({}, "weight_map must be an object of tensor names"),
        ({"a": 1}, "weight_map: a must be a file name, got 1"),
        ({"a": "\ud800"}, "a string with half of a surrogate pair"),
        ({"a": "model-3.safetensors"}, "the shard 'model-3.safetensors' does not exist; download it again"),
        ({"a": "x" * 5000}, "does not exist"),
        ({"a": "nul\0"}, "does not exist"),
        ({"a": "/etc/passwd"}, "'/etc/passwd' leaves the index's folder"),
        ({"a": "C:\\x.safetensors"}, "leaves the index's folder"),
        ({"a": "../x.safetensors"}, "leaves the index's folder"),
        ({"a": "x/../../y.safetensors"}, "leaves the index's folder"),
        ({"a": "..\\x.safetensors"}, "leaves the index's folder"),
        ({"a": TWO, "b": TWO, "c": TWO}, "says that tensor 'a' is in model-2.safetensors, and it is not"),
        ({"a": ONE, "b": TWO, "c": TWO, "d": ONE}, "says that tensor 'd' is in model-1.safetensors, and it is not"),
        ({"a": ONE, "b": TWO}, "does not list tensor 'c', which is in model-2.safetensors"),
    ],
)
def test_index_that_lies(weight_map, message, tmp_path):
    with pytest.raises(FileFormatError, match=message):
        open_checkpoint(sharded(tmp_path, weight_map))


def test_index_that_is_no_object(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(FileFormatError, match="the document must be an object"):
        open_checkpoint(index)
    index.write_text("{")
    with pytest.raises(FileFormatError, match="not valid JSON"):
        open_checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    index = sharded(tmp_path)
    save(tmp_path / TWO, {"a": torch.zeros(2, 3), "b": torch.ones(4), "c": torch.tensor(5)})
    with pytest.raises(FileFormatError, match=r"model-2.safetensors: tensor 'a' is also in model-1.safetensors"):
        open_checkpoint(index)


def test_folders_without_an_answer(tmp_path):
    with pytest.raises(FileFormatError, match=r"has neither a .safetensors file nor an index"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(
        FileFormatError, match=r"pytorch_model.bin looks like a pickle, and bitplan never opens pickles"
    ):
        open_checkpoint(tmp_path)
    sharded(tmp_path).unlink()
    with pytest.raises(FileFormatError, match=f"and 2 others: {ONE}, {TWO}; pass the one you mean"):
        open_checkpoint(tmp_path)


def test_a_folder_is_read_as_transformers_reads_it(tmp_path, caplog):
    def opened():
        with open_checkpoint(tmp_path) as checkpoint:
            return set(checkpoint.tensors)

    index = sharded(tmp_path)
    save(tmp_path / "adapter_model.safetensors", {"lora": torch.ones(1)})
    save(tmp_path / "consolidated.safetensors", {"same": torch.ones(1)})
    assert opened() == opened() == {"a", "b", "c"}
    message = [record.getMessage() for record in caplog.records]
    taken = f"{index.name} is read, as transformers does; ignored: adapter_model.safetensors, consolidated.safetensors"
    assert message == [f"{tmp_path}: {taken}"]
    save(tmp_path / "model.safetensors", {"whole": torch.ones(1)})
    assert opened() == {"whole"}
    assert "model.safetensors is read, as transformers does; ignored: adapter_model.safetensors, " in caplog.text
    for name in (index.name, ONE, TWO):
        (tmp_path / name).unlink()
    assert opened() == {"whole"}


def test_a_shard_named_as_a_whole_model_is_a_shard(tmp_path):
    index = sharded(tmp_path)
    (tmp_path / ONE).rename(tmp_path / "model.safetensors")
    index.write_text(index.read_text().replace(ONE, "model.safetensors"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "name", ["model.bin", "model.pt", "model.pth", "model.safetensors", "pytorch_model.bin.index.json"]
)
def test_pickles_are_refused(name, tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(FileFormatError, match=r"bitplan never opens pickles .* safetensors.torch.save_file"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("name", ["missing", "missing.safetensors", "missing.safetensors.index.json"])
def test_no_such_checkpoint(name, tmp_path):
    with pytest.raises(FileFormatError, match=f"{name}: no such file"):
        open_checkpoint(tmp_path / name)


HEADERS = {
    "short names": lambda i: f'"{i}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}',
    "long names": lambda i: f'"layers.{i:0200}.w":{{"dtype":"U8","shape":[1,1],"data_offsets":[{i},{i + 1}]}}',
    "wide letters": lambda i: f'"{i}\N{GRINNING FACE}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_takes_twice_its_bytes_and_a_constant(kind, tmp_path, monkeypatch):
    """A fifth of a MiB in place of 128, so that the largest header that is read is a small one."""
    limit = 2**20 // 5
    monkeypatch.setattr(records, "MAX_JSON_MEMORY", limit)
    path, low, high = tmp_path / "many.safetensors", 1, 1000
    while low + 1 < high:  # the most tensors that are read
        count = (low + high) // 2
        header = ("{" + ",".join(map(HEADERS[kind], range(count))) + "}").encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(count))
        tracemalloc.start()
        try:
            SafetensorsFile(path).close()
            low, peak, size = count, tracemalloc.get_traced_memory()[1], len(header)
        except FileFormatError:
            high = count
        finally:
            tracemalloc.stop()
    assert 50 < low < 999
    assert peak < 2 * size + limit + 20_000


def test_an_entry_of_other_fields_is_refused(tmp_path):
    short = {"dtype": "F32", "shape": []}
    for fields, got in ((3, "'int'"), (short, "['dtype', 'shape']"), (entry() | {"x": 1}, "['data_offsets', ")):
        path = save_header(tmp_path / "bad.safetensors", {"a": fields}, bytes(4))
        message = f"{path}: tensor 'a': expected exactly dtype, shape and data_offsets, got {got}"
        with pytest.raises(FileFormatError, match=re.escape(message)):
            SafetensorsFile(path)


def test_many_shards_are_not_all_open_at_once_and_one_that_changes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "MOST_OPEN", 5)
    for number in range(20):
        safetensors.torch.save_file({f"t{number}": torch.full((2,), float(number))}, tmp_path / f"{number}.safetensors")
    weight_map = {f"t{number}": f"{number}.safetensors" for number in range(20)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(os.listdir("/proc/self/fd")) == before
        assert [checkpoint.read(f"t{number}")[0].item() for number in range(20)] == list(range(20))
        safetensors.torch.save_file({"t3": torch.zeros(3)}, tmp_path / "3.safetensors")
        with pytest.raises(StoreError, match=r"3.safetensors: was changed while it was read"):
            checkpoint.read("t3")
    with pytest.raises(StoreError, match="was asked for after the file was closed"):
        checkpoint.read("t4")
