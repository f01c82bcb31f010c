"""Our GGUF against the real gguf library both ways, and every malformed header."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFValueType
from gguf import GGMLQuantizationType as Type

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.files import gguf as gguf_io
from bitplan.files.gguf import (
    GGUFArray,
    GGUFFile,
    GGUFValue,
    dequantizable_types,
    dequantize_rows,
    plain_dtype,
    write_gguf,
)
from tests.crosses import few

V = GGUFValueType
ARCHITECTURE = {"general.architecture": GGUFValue(V.STRING, "llama")}
EVERY_VALUE = ARCHITECTURE | {
    "k.uint8": GGUFValue(V.UINT8, 255),
    "k.int8": GGUFValue(V.INT8, -128),
    "k.uint16": GGUFValue(V.UINT16, 65535),
    "k.int16": GGUFValue(V.INT16, -32768),
    "k.uint32": GGUFValue(V.UINT32, 2**32 - 1),
    "k.int32": GGUFValue(V.INT32, -(2**31)),
    "k.uint64": GGUFValue(V.UINT64, 2**64 - 1),
    "k.int64": GGUFValue(V.INT64, -(2**63)),
    "k.float32": GGUFValue(V.FLOAT32, struct.unpack("<f", struct.pack("<f", 1e-5))[0]),
    "k.float64": GGUFValue(V.FLOAT64, 1e-300),
    "k.bool": GGUFValue(V.BOOL, True),
    "k.string": GGUFValue(V.STRING, "schräg 層 🙂\n"),
    "k.empty": GGUFValue(V.STRING, ""),
    "k.words": GGUFValue(V.ARRAY, ("a", "", "層"), V.STRING),
    "k.scores": GGUFValue(V.ARRAY, (0.5, -1.0, float("inf")), V.FLOAT32),
    "k.kinds": GGUFValue(V.ARRAY, (1, -1, 3), V.INT32),
    "k.bytes": GGUFValue(V.ARRAY, tuple(range(256)), V.UINT8),
    "k.flags": GGUFValue(V.ARRAY, (True, False), V.BOOL),
    "k.nothing": GGUFValue(V.ARRAY, (), V.INT16),
    "k.nested": GGUFValue(
        V.ARRAY,
        (GGUFValue(V.ARRAY, (1, 2), V.INT32), GGUFValue(V.ARRAY, ("x",), V.STRING), GGUFValue(V.ARRAY, (), V.BOOL)),
        V.ARRAY,
    ),
}


def raw_sample(kind: Type, *shape: int) -> torch.Tensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    *lead, row = shape
    count = int(np.prod(lead)) * (row // block * block_bytes)
    return (torch.arange(count) * 37 % 251).to(torch.uint8).reshape(*lead, row // block * block_bytes)


def save(path: Path, tensors: dict[str, tuple[Type, tuple[int, ...], torch.Tensor]], metadata=None) -> Path:
    entries = [(name, kind, shape) for name, (kind, shape, _) in tensors.items()]
    with write_gguf(path, entries, ARCHITECTURE if metadata is None else metadata) as writer:
        for name in writer.order:
            writer.write(name, tensors[name][2])
    return path


def every_type() -> dict[str, tuple[Type, tuple[int, ...], torch.Tensor]]:
    return {f"blk.{kind.name}.weight": (kind, (2, 3, 256), raw_sample(kind, 2, 3, 256)) for kind in GGML_QUANT_SIZES}


# --- both ways -------------------------------------------------------------------------------


def test_read_back_what_was_written(tmp_path):
    tensors = every_type() | {"1d": (Type.F32, (5,), raw_sample(Type.F32, 5))}
    with GGUFFile(save(tmp_path / "a.gguf", tensors, EVERY_VALUE)) as file:
        assert (file.version, file.alignment) == (3, 32)
        assert file.metadata == EVERY_VALUE
        assert list(file.metadata) == list(EVERY_VALUE)
        assert list(file.tensors) == list(tensors)
        for name, (kind, shape, raw) in tensors.items():
            result = file.tensors[name]
            assert (result.type, result.shape, result.nbytes, result.start % 32) == (kind, shape, raw.numel(), 0)
            assert torch.equal(file.read_raw(name), raw)


def test_library_reads_ours(tmp_path):
    tensors = every_type()
    reader = gguf.GGUFReader(save(tmp_path / "a.gguf", tensors, EVERY_VALUE))
    for key, value in EVERY_VALUE.items():
        field = reader.fields[key]
        assert field.types[0] == value.type
        if key not in ("k.nested", "k.nothing"):  # the library flattens the one and loses the other's type
            assert field.contents() == (list(value.value) if value.item_type is not None else value.value), key
            assert field.types[1:] == ([] if value.item_type is None else [value.item_type])
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    for tensor in reader.tensors:
        kind, shape, raw = tensors[tensor.name]
        assert (tensor.tensor_type, tuple(tensor.shape.tolist()), tensor.n_bytes) == (kind, shape[::-1], raw.numel())
        assert tensor.data.tobytes() == raw.numpy().tobytes()


def librarys_file(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "a", "層"])
    writer.add_token_scores([0.0, -1.0, -2.5])
    writer.add_token_types([3, 1, 1])
    writer.add_bool("general.flag", True)
    writer.add_array("nested", [[1, 2], [3]])
    rows = np.arange(3 * 256, dtype=np.float32).reshape(3, 256)
    writer.add_tensor("f32", rows)
    writer.add_tensor("f16", rows[:, :5].astype(np.float16))
    writer.add_tensor("q8", gguf.quants.quantize(rows, Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.add_tensor("i8", np.arange(7, dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_rewriting_the_librarys_file_gives_the_same_bytes(alignment, tmp_path):
    source = librarys_file(tmp_path / "theirs.gguf", alignment)
    with GGUFFile(source) as file:
        assert file.metadata["general.architecture"].value == "llama"
        assert file.metadata["llama.block_count"] == GGUFValue(V.UINT32, 2)
        assert file.tensors["q8"].shape == (3, 256)
        entries = [(tensor.name, tensor.type, tensor.shape) for tensor in file.tensors.values()]
        with write_gguf(tmp_path / "ours.gguf", entries, file.metadata) as writer:
            for name in writer.order:
                writer.write(name, file.read_raw(name))
    assert (tmp_path / "ours.gguf").read_bytes() == source.read_bytes()


def test_version_2_is_read(tmp_path):
    path = save(tmp_path / "a.gguf", {"x": (Type.I8, (3,), raw_sample(Type.I8, 3))})
    content = bytearray(path.read_bytes())
    content[4] = 2
    path.write_bytes(content)
    with GGUFFile(path) as file:
        assert file.version == 2
        assert file.read_raw("x").tolist() == [0, 37, 74]


def test_file_without_tensors_and_without_final_padding(tmp_path):
    path = save(tmp_path / "a.gguf", {}, {})
    with GGUFFile(path) as file:
        assert (file.tensors, file.metadata) == ({}, {})
    path = save(tmp_path / "b.gguf", {"x": (Type.I8, (3,), raw_sample(Type.I8, 3))})
    os.truncate(path, path.stat().st_size - 29)
    with GGUFFile(path) as file:
        assert file.read_raw("x").tolist() == [0, 37, 74]


# --- reading ---------------------------------------------------------------------------------


def test_rows_count_over_the_leading_dimensions(tmp_path):
    raw = raw_sample(Type.Q4_K, 2, 3, 512)
    with GGUFFile(save(tmp_path / "a.gguf", {"x": (Type.Q4_K, (2, 3, 512), raw)})) as file:
        assert file.tensors["x"].raw_shape == (2, 3, 288)
        for start, stop in [(0, 6), (2, 4), (5, 6), (6, 6)]:
            assert torch.equal(file.read_raw_rows("x", start, stop), raw.reshape(6, 288)[start:stop])
        with pytest.raises(StoreError, match="'x' has 6 rows; rows 4 to 7 are not among them"):
            file.read_raw_rows("x", 4, 7)
        with pytest.raises(StoreError, match="no tensor 'y'"):
            file.read_raw("y")
    with pytest.raises(StoreError, match="after the file was closed"):
        file.read_raw("x")


def test_scalar(tmp_path):
    with GGUFFile(save(tmp_path / "a.gguf", {"x": (Type.F32, (), torch.tensor(2.5))})) as file:
        assert file.tensors["x"].shape == ()
        assert dequantize_rows(file.read_raw("x"), Type.F32).tolist() == [2.5]
        assert file.read_raw_rows("x", 0, 1).shape == (1, 4)


@pytest.mark.parametrize("kind", few(dequantizable_types(), 16), ids=lambda kind: kind.name)
def test_dequantize_every_type(kind, tmp_path):
    raw = raw_sample(kind, 2, 18, 256)
    reader = gguf.GGUFReader(save(tmp_path / "a.gguf", {"x": (kind, (2, 18, 256), raw)}))
    values = dequantize_rows(raw, kind)
    assert (values.dtype, values.shape) == (torch.float32, (2, 18, 256))
    with np.errstate(all="ignore"):
        stored = reader.tensors[0].data
        if stored.dtype in (np.float64, np.int8, np.int16, np.int32, np.int64):
            expected = stored.astype(np.float32)
        else:
            expected = gguf.quants.dequantize(stored, kind)
    np.testing.assert_array_equal(values.numpy(), expected)
    assert torch.equal(dequantize_rows(raw[1, 3:5], kind).view(torch.int32), values[1, 3:5].view(torch.int32))
    assert dequantize_rows(raw[:, :0], kind).shape == (2, 0, 256)


def test_plain_types_have_the_bytes_of_their_dtype():
    plain = {kind: plain_dtype(kind) for kind in GGML_QUANT_SIZES}
    assert all(dtype.itemsize == GGML_QUANT_SIZES[kind][1] for kind, dtype in plain.items() if dtype is not None)
    assert {kind for kind, dtype in plain.items() if dtype} == {
        k for k, (block, _) in GGML_QUANT_SIZES.items() if block == 1
    }


def test_dequantize_gives_its_own_memory():
    raw = torch.zeros(2, 8, dtype=torch.uint8)
    dequantize_rows(raw, Type.F32).fill_(1)
    assert not raw.any()


def test_dequantize_refuses():
    assert {Type.Q4_0, Type.Q6_K, Type.IQ4_XS, Type.BF16, Type.F64} < set(dequantizable_types())
    with pytest.raises(StoreError, match=r"cannot decode Q8_1; it can decode: F32, F16, Q4_0, .*BF16"):
        dequantize_rows(torch.zeros(1, 40, dtype=torch.uint8), Type.Q8_1)
    with pytest.raises(StoreError, match=r"Q4_0 rows are uint8 of a multiple of 18 bytes, got torch.uint8 \(1, 19\)"):
        dequantize_rows(torch.zeros(1, 19, dtype=torch.uint8), Type.Q4_0)
    with pytest.raises(StoreError, match=r"got torch.float32"):
        dequantize_rows(torch.zeros(1, 18), Type.Q4_0)


# --- malformed files -------------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def info(name: str | bytes = "x", ne=(32,), kind: int = Type.F32, offset: int = 0, rank: int | None = None) -> bytes:
    shape = struct.pack(f"<I{len(ne)}Q", len(ne) if rank is None else rank, *ne)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def build(keys=(), infos=(), payload=b"", version=3, n_keys=None, n_infos=None, magic=b"GGUF") -> bytes:
    counts = (len(infos) if n_infos is None else n_infos, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + payload


def array(item: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + items


def nest(depth: int) -> bytes:
    return array(V.ARRAY, 1) * depth + array(V.UINT8, 0)


MALFORMED = {
    "empty": (b"", "the magic at byte 0 needs 4 bytes, 0 are left"),
    "magic": (build(magic=b"GGML"), "not a GGUF file: it begins with b'GGML'"),
    "big-endian": (build(version=3 << 24), "a big-endian GGUF file; .* gguf-convert-endian"),
    "version 1": (build(version=1), "GGUF version 1, read are 2 and 3"),
    "version 4": (build(version=4), "GGUF version 4"),
    "no counts": (build()[:20], "the number of metadata keys at byte 16 needs 8 bytes, 4 are left"),
    "tensor count": (
        build(n_infos=2**63),
        "9223372036854775808 tensors before byte 16 cannot fit in the 16 bytes left",
    ),
    "key count": (build(n_keys=2), "2 metadata keys before byte 24 cannot fit in the 8 bytes left"),
    "key too long": (build([key("k" * 65536, V.UINT8, b"1")]), "a metadata key has 65536 bytes, at most 65535"),
    "key not UTF-8": (build([key(b"\xff", V.UINT8, b"1")]), "a metadata key before byte 33 is not UTF-8"),
    "key twice": (build([key("k", V.UINT8, b"1")] * 2), "metadata key 'k' appears twice"),
    "value type": (build([key("k", 13, b"1")]), "metadata 'k' has type 13, known are 0 to 12"),
    "value cut": (build([key("k", V.UINT64, b"")])[:37], "metadata 'k' at byte 37 needs 8 bytes, 0 are left"),
    "bool of 2": (build([key("k", V.BOOL, b"\2")]), "metadata 'k' is a bool, but no byte 0 or 1"),
    "string length": (build([key("k", V.STRING, struct.pack("<Q", 2**40))]), "metadata 'k' has 1099511627776 bytes"),
    "string past the end": (
        build([key("k", V.STRING, struct.pack("<Q", 99))]),
        "metadata 'k' at byte .* needs 99 bytes",
    ),
    "string not UTF-8": (build([key("k", V.STRING, string(b"\xc3"))]), "metadata 'k' before byte .* is not UTF-8"),
    "array type": (build([key("k", V.ARRAY, array(99, 0))]), "metadata 'k' has type 99"),
    "array count": (build([key("k", V.ARRAY, array(V.STRING, 2**61))]), "2305843009213693952 items of metadata 'k'"),
    "array of bools": (build([key("k", V.ARRAY, array(V.BOOL, 2, b"\1\3"))]), "is a bool, but no byte 0"),
    "array nesting": (build([key("k", V.ARRAY, nest(4))]), "metadata 'k' nests arrays more than 4 deep"),
    "array nesting without end": (build([key("k", V.ARRAY, nest(9999))]), "nests arrays more than 4 deep"),
    "alignment 0": (build([key("general.alignment", V.UINT32, bytes(4))]), "must be a UINT32 power of two .* UINT32 0"),
    "alignment 48": (build([key("general.alignment", V.UINT32, b"0\0\0\0")]), "got UINT32 48"),
    "alignment huge": (build([key("general.alignment", V.UINT32, b"\0\0\0\x80")]), "got UINT32 2147483648"),
    "alignment text": (build([key("general.alignment", V.STRING, string("32"))]), "got STRING '32'"),
    "tensor name too long": (build([], [info("n" * 1025)]), "a tensor name has 1025 bytes, at most 1024"),
    "tensor name not UTF-8": (build([], [info(b"\xff")]), "a tensor name before byte 33 is not UTF-8"),
    "tensor twice": (build([], [info(), info(offset=128)], bytes(256)), "tensor 'x' appears twice"),
    "rank 5": (build([], [info(ne=[1] * 5)], bytes(64)), "tensor 'x' has 5 dimensions, ggml holds at most 4"),
    "rank huge": (build([], [info(rank=2**32 - 1)], bytes(64)), "tensor 'x' has 4294967295 dimensions"),
    "size 0": (build([], [info(ne=[4, 0])]), r"shape must be at most 4 positive integers, got \(0, 4\)"),
    "size negative": (build([], [info(ne=[2**64 - 1])]), "shape must be at most 4 positive integers"),
    "tensor type": (build([], [info(kind=4)], bytes(64)), "tensor 'x' has type 4, known to .* are: 0 F32, 1 F16"),
    "broken block": (
        build([], [info(ne=[33], kind=Type.Q8_0)], bytes(99)),
        "rows of 33 elements do not divide into Q8_0",
    ),
    "scalar block": (build([], [info(ne=[], kind=Type.Q8_0)], bytes(99)), "rows of 1 elements do not divide into Q8_0"),
    "offset unaligned": (build([], [info(offset=4)], bytes(132)), "offset 4 is not a multiple of the alignment 32"),
    "past the end": (build([], [info()], bytes(127)), "tensor 'x' ends at byte .* cut short: copy or download"),
    "far past the end": (build([], [info(offset=2**64 - 32)], bytes(128)), "tensor 'x' ends at byte"),
    "product overflows": (build([], [info(ne=[2**62, 2**62, 4])], bytes(128)), "tensor 'x' ends at byte"),
    "overlap": (
        build([], [info(), info("y", offset=96)], bytes(256)),
        "tensor 'y' overlaps .* offset 96, expected 128",
    ),
    "same place": (build([], [info(), info("y")], bytes(256)), "tensor 'y' overlaps the tensor before it"),
    "hole": (build([], [info(), info("y", offset=160)], bytes(288)), "tensor 'y' leaves a hole .* 160, expected 128"),
    "hole at the start": (build([], [info(offset=32)], bytes(160)), "tensor 'x' leaves a hole before it"),
    "bytes after the end": (build([], [info()], bytes(129)), "some bytes belong to no tensor"),
    "info cut": (build([], [info()])[:56], "the offset of tensor 'x' at byte 49 needs 8 bytes, 7 are left"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused(case, tmp_path):
    content, message = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_builder_of_malformed_files_can_build_a_good_one(tmp_path):
    content = build(
        [key("k", V.ARRAY, nest(3))], [info(), info("y", ne=[64, 2], kind=Type.Q8_0, offset=128)], bytes(264)
    )
    (tmp_path / "good.gguf").write_bytes(content)
    with GGUFFile(tmp_path / "good.gguf") as file:
        assert file.read_raw("y").shape == (2, 68)


def test_header_limit_holds_even_if_the_file_is_large_enough(tmp_path):
    path = tmp_path / "sparse.gguf"
    path.write_bytes(build([key("k", V.ARRAY, array(V.STRING, 2**36))]))
    os.truncate(path, 2**40)  # takes no room on disk, and could hold 2**36 empty strings
    with pytest.raises(FileFormatError, match="68719476736 items of metadata 'k'"):
        GGUFFile(path)


def test_no_such_file(tmp_path):
    with pytest.raises(FileFormatError, match=r"no such file|is a folder, and a regular file"):
        GGUFFile(tmp_path / "missing.gguf")


# --- writing ---------------------------------------------------------------------------------


def test_chunks_and_plain_tensors(tmp_path):
    raw = raw_sample(Type.Q8_0, 4, 64)
    half = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).T
    with write_gguf(tmp_path / "a.gguf", [("q", Type.Q8_0, (4, 64)), ("b", Type.BF16, (2, 3))], ARCHITECTURE) as writer:
        assert writer.order == ("q", "b")
        for start in range(0, 4, 3):
            writer.write_chunk("q", raw[start : start + 3])
        writer.write("b", half)
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert torch.equal(file.read_raw("q"), raw)
        assert torch.equal(dequantize_rows(file.read_raw("b"), Type.BF16), half.float())


X = torch.zeros(2, 34, dtype=torch.uint8)
MISUSE = {
    "unknown": (lambda w: w.write("z", torch.zeros(3)), "tensor 'z' came but was not promised"),
    "wrong dtype": (lambda w: w.write("x", X.float()), "promised as torch.uint8, came as torch.float32"),
    "wrong plain dtype": (
        lambda w: [w.write("x", X), w.write("y", X.half())],
        "as torch.uint8 or torch.float32, came as",
    ),
    "wrong shape": (lambda w: w.write("x", X.reshape(-1)), r"promised as \(2, 34\), came as \(68,\)"),
    "too many bytes": (lambda w: w.write_chunk("x", bytes(69)), "68 bytes, 0 came and 69 more are too many"),
    "left out": (lambda w: w.write("x", X), "'y' was promised with 12 bytes, 0 came; the file was not written"),
    "caller fails": (lambda w: [w.write("x", X), 1 / 0], "division by zero"),
}


@pytest.mark.parametrize("case", MISUSE)
@pytest.mark.parametrize("old", [None, b"old content"])
def test_misuse_leaves_the_target_untouched(case, old, tmp_path):
    act, message = MISUSE[case]
    path = tmp_path / "a.gguf"
    if old is not None:
        path.write_bytes(old)
    with (
        pytest.raises((StoreError, ZeroDivisionError), match=message),
        write_gguf(path, [("x", Type.Q8_0, (2, 32)), ("y", Type.F32, (3,))], ARCHITECTURE) as writer,
    ):
        act(writer)
    assert [p.name for p in tmp_path.iterdir()] == ([] if old is None else [path.name])
    assert old is None or path.read_bytes() == old


@pytest.mark.parametrize(
    ("entries", "metadata", "message"),
    [
        ([("a", Type.F32, (1,))] * 2, {}, "tensor 'a': the name is taken"),
        ([("a" * 1025, Type.F32, (1,))], {}, "takes 1025 bytes, at most 1024 are allowed"),
        ([("\ud800", Type.F32, (1,))], {}, "cannot be written as UTF-8"),
        ([("a", Type.F32, (0,))], {}, r"shape must be at most 4 positive integers, got \(0,\)"),
        ([("a", Type.F32, (1,) * 5)], {}, "shape must be at most 4 positive integers"),
        ([("a", Type.Q4_K, (255,))], {}, "rows of 255 elements do not divide into Q4_K blocks of 256"),
        ([], {"k": GGUFValue(V.UINT8, 256)}, "'k': 256 is not a GGUF UINT8"),
        ([], {"k": GGUFValue(V.UINT8, "1")}, "'k': '1' is not a GGUF UINT8"),
        ([], {"k": GGUFValue(V.FLOAT32, 1e300)}, "is not a GGUF FLOAT32"),
        ([], {"k": GGUFValue(V.BOOL, 1)}, "'k': 1 is not a GGUF BOOL"),
        ([], {"k": GGUFValue(V.STRING, 1)}, "'k': 1 is not a GGUF STRING"),
        ([], {"k": GGUFValue(V.STRING, "\ud800")}, "cannot be written as UTF-8"),
        ([], {"k": GGUFValue(V.ARRAY, (1, "a"), V.INT8)}, r"'k': \(1, 'a'\) is not a GGUF ARRAY of INT8"),
        ([], {"k": GGUFValue(V.ARRAY, (1,), V.ARRAY)}, "is not a GGUF ARRAY of ARRAY"),
        ([], {"k": GGUFValue(V.ARRAY, (1,))}, "is not a GGUF ARRAY"),
        ([], {"general.alignment": GGUFValue(V.UINT32, 33)}, "general.alignment must be a UINT32 power of two"),
    ],
)
def test_what_cannot_be_written(entries, metadata, message, tmp_path):
    with pytest.raises((StoreError, FileFormatError), match=message), write_gguf(tmp_path / "a", entries, metadata):
        pass
    assert list(tmp_path.iterdir()) == []


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_long_array_takes_the_memory_of_its_bytes(tmp_path):
    count = 2_000_000
    words = struct.pack("<Q", 3) + b"abc"
    keys = [
        key("numbers", V.ARRAY, array(V.INT32, count, struct.pack("<i", 100_000) * count)),
        key("words", V.ARRAY, array(V.STRING, 20_000, words * 20_000)),
    ]
    content = build(keys)
    path = tmp_path / "long.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with GGUFFile(path) as file:
            peak = tracemalloc.get_traced_memory()[1]
            numbers, texts = file.metadata["numbers"].value, file.metadata["words"].value
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(content)
    assert (len(numbers), numbers[-1], texts[7], len(texts)) == (count, 100_000, "abc", 20_000)
    assert texts == ("abc",) * 20_000
    with write_gguf(tmp_path / "again.gguf", [], file.metadata):
        pass
    assert (tmp_path / "again.gguf").read_bytes() == content


@pytest.mark.parametrize(
    ("limit", "content", "message"),
    [
        ("MAX_KEYS", build([key(f"k{number}", V.UINT8, b"\1") for number in range(3)]), "3 metadata keys, at most 2"),
        ("MAX_TENSORS", build(infos=[b"\0" * 32] * 3), "3 tensors, at most 2 are read"),
        ("MAX_STRINGS", build([key("k", V.ARRAY, array(V.STRING, 3, bytes(24)))]), "3 strings in all, at most 2"),
        (
            "MAX_KEYS",
            build([key("k", V.ARRAY, array(V.ARRAY, 3, array(V.UINT8, 0) * 3))]),
            "has arrays in arrays, at most 2",
        ),
    ],
    ids=["keys", "tensors", "strings", "arrays"],
)
def test_what_costs_objects_is_limited(limit, content, message, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_io, limit, 2)
    (tmp_path / "many.gguf").write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        GGUFFile(tmp_path / "many.gguf")


def test_a_text_of_exactly_the_most_bytes_is_written():
    assert gguf_io._pack_string("four", 4) == struct.pack("<Q", 4) + b"four"
    with pytest.raises(StoreError, match="takes 5 bytes, at most 4"):
        gguf_io._pack_string("fours", 4)


def test_a_file_may_end_with_its_header(tmp_path):
    path = tmp_path / "a.gguf"
    content = build([key("general.architecture", V.STRING, string("llama"))]).rstrip(b"\0")
    path.write_bytes(content)
    with GGUFFile(path) as file:
        assert file.metadata["general.architecture"].value == "llama"
    path.write_bytes(content[:-1])
    with pytest.raises(FileFormatError, match="needs 5 bytes, 4 are left"):
        GGUFFile(path)


def test_an_array_as_the_file_has_it_is_written_as_another_type(tmp_path):
    path, small = tmp_path / "a.gguf", GGUFArray(V.UINT8, 3, bytes([1, 2, 255]))
    values = {kind.name: GGUFValue(V.ARRAY, small, kind) for kind in (V.UINT8, V.INT32)}
    with write_gguf(path, [], ARCHITECTURE | values):
        pass
    with GGUFFile(path) as file:
        assert {name: tuple(file.metadata[name].value) for name in values} == dict.fromkeys(values, (1, 2, 255))
