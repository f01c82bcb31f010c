"""Deep checks: a sound file of any kind has no finding, and each fault has its own, with its count and first place."""

from __future__ import annotations

import json
import math

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

from bitplan.base.errors import FileFormatError
from bitplan.files import packed_rows
from bitplan.files.deep_check import deep_check, index_of
from bitplan.files.engines.gguf import write_parts
from bitplan.files.gguf import GGUFFile, GGUFValue, dequantize_rows, write_gguf
from bitplan.files.open_files import open_tensors, write_tensors
from bitplan.files.safetensors import SafetensorsFile
from bitplan.files.tensor_bytes import ContainerFile
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import encode
from bitplan.formats.registry import list_formats
from bitplan.plan import Manifest
from bitplan.plan.manifest import Rule, shipped_manifest
from tests.crosses import few

ANY = Manifest((Rule(".*", "bfloat16"),))
PACKED = [pytest.param(fmt, id=fmt.name) for fmt in list_formats() if not fmt.is_cast]
GGUF_PACKED = ["q4_0_gguf", "q8_0_gguf", "mxfp4_gguf"]
# Where blocks hold float16 numbers, as byte offsets; ggml-common.h.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    **dict.fromkeys(("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"), (0,)),
}
BLOCKS, SCALES = "block.0.mlp.mlp1_weight.blocks", "block.0.mlp.mlp1_weight.scales"
HF_BLOCKS = "model.layers.0.mlp.experts.gate_up_proj_blocks"


def test_one_flipped_byte_of_any_tensor_is_found_and_files_without_checksums_are_read(tmp_path):
    items = {"up.weight": encode(gaussian(4, 64), "mxfp4"), "norm.weight": torch.ones(64)}
    path = tmp_path / "m.safetensors"
    write(path, items)
    sound = path.read_bytes()
    with SafetensorsFile(path) as file:
        places = {name: entry.start + entry.nbytes // 2 for name, entry in file.tensors.items()}
        digits = "".join(f"{checksum:08x}" for checksum in file.checksums.values()).encode()
    for name, place in places.items():
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with open_tensors(path) as file:
            finding = deep_check(None, file)[-1]
        assert (finding.code, finding.where) == ("checksum", name.removesuffix(".scales"))
        assert "other bytes than were written; copy or write the file again" in finding.message
    safetensors.torch.save_file({"up.weight": torch.ones(2, 2)}, path)
    with open_tensors(path) as file:
        assert deep_check(None, file) == []
    path.write_bytes(sound.replace(digits, b"x" * len(digits)))
    with pytest.raises(FileFormatError, match="'bitplan_crc32' must be 8 hexadecimal digits for each tensor, got 'xxx"):
        open_tensors(path)


def flipped(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("parts", [False, True])
def test_one_flipped_byte_of_a_gguf_file_that_we_wrote_is_found(tmp_path, parts):
    items = {"a.weight": encode(gaussian(4, 64), "q4_0_gguf"), "b.weight": gaussian(3, 5)}
    path = tmp_path / "m.gguf"
    promises = [TensorSpec.of("a.weight", (4, 64), items["a.weight"].fmt), TensorSpec.of("b.weight", (3, 5))]
    with write_parts(path, promises, {}, 2**6 if parts else None) as writer:
        for name, item in items.items():
            writer.write(name, item)
    with open_tensors(writer.paths[0]) as file:
        assert file.has_checksums
        assert not any(key.startswith("bitplan") for key in file.metadata)
        assert deep_check(None, file) == []
    with GGUFFile(writer.paths[-1]) as file:
        place = file.tensors["b.weight"].start + 7
    flipped(writer.paths[-1], place)
    finding = only(writer.paths[0], None)
    assert (finding.code, finding.where) == ("checksum", "b.weight")


def test_checksums_that_another_program_copied_into_a_gguf_file_of_other_tensors_count_as_none(tmp_path):
    path = write(tmp_path / "m.gguf", {"a.weight": gaussian(3, 32), "b.weight": gaussian(3, 5)})
    with GGUFFile(path) as file:
        said = GGUFValue(GGUFValueType.STRING, "0" * 24)
        entries = [(name, Type.F16, entry.shape) for name, entry in file.tensors.items()]
        assert len(file.checksums) == 2
    with write_gguf(tmp_path / "copy.gguf", entries, {"bitplan.crc3x": said}) as writer:
        for name, _, shape in entries:
            writer.write(name, torch.ones(shape, dtype=torch.float16))
    raw = (tmp_path / "copy.gguf").read_bytes()
    (tmp_path / "copy.gguf").write_bytes(raw.replace(b"bitplan.crc3x", b"bitplan.crc32"))
    with open_tensors(tmp_path / "copy.gguf") as file:
        assert not file.has_checksums
        assert deep_check(None, file) == []


def test_a_changed_number_or_scale_of_a_network_that_we_wrote_is_found(tmp_path):
    path = write(tmp_path / "m.json", {"a": encode(gaussian(4, 6), "int8"), "b": gaussian(3)})
    with open_tensors(path) as file:
        assert file.has_checksums
        assert deep_check(None, file) == []
    document = json.loads(path.read_text())
    document["layers"][0]["scale"] *= 2
    path.write_text(json.dumps(document))
    finding = only(path, None)
    assert (finding.code, finding.where) == ("checksum", "a")
    for layer in document["layers"]:
        del layer["crc32"]
    path.write_text(json.dumps(document))
    with open_tensors(path) as file:
        assert not file.has_checksums
        assert deep_check(None, file) == []


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write(path, items, **options):
    promises = [
        TensorSpec.of(name, item.shape, item.fmt)
        if isinstance(item, Encoded)
        else TensorSpec.of(name, tuple(item.shape), dtype=item.dtype)
        for name, item in items.items()
    ]
    with write_tensors(path, promises, **options) as writer:
        for name, item in items.items():
            writer.write(name, item)
    return path


def findings(path, manifest=ANY, **options):
    with open_tensors(path) as file:
        return deep_check(manifest, file, **options)


def only(path, manifest=ANY):
    (finding,) = findings(path, manifest)
    return finding


def with_zero_blocks(*shape):
    x = gaussian(*shape)
    x[0] = 0.0
    return x


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(packed_rows, "PIECE_BYTES", 1024)


# ---- sound files -----------------------------------------------------------------------------------------------------


@pytest.mark.cross("fmt", few(PACKED, 16))
@pytest.mark.cross("numbers", ["gaussian", "uniform", "zero"])
def test_packed_tensors_of_every_format_are_clean(fmt, numbers, tmp_path):
    """Uniform numbers put up to half of the blocks at the largest scale that shares a base: no finding."""
    x = {"gaussian": with_zero_blocks(64, 512), "uniform": torch.rand(64, 512) * 2 - 1, "zero": torch.zeros(4, 256)}
    items = {"w": encode(x[numbers], fmt), "b": gaussian(8), "empty": torch.zeros(0, 4), "scalar": torch.ones(())}
    assert findings(write(tmp_path / "a.safetensors", items)) == []


@pytest.mark.parametrize("name", GGUF_PACKED)
def test_gguf_is_clean(name, tmp_path):
    items = {"w": encode(with_zero_blocks(2, 6, 64), name), "n": gaussian(8), "h": encode(gaussian(3, 4), "float16")}
    assert findings(write(tmp_path / "a.gguf", items)) == []


def test_padded_rows_convolutions_and_json_are_clean(tmp_path):
    items = {
        "odd": encode(gaussian(3, 33), "mxfp4", pad="zero"),
        "conv": encode(gaussian(4, 3, 5, 5), "nvfp4", pad="zero"),
        "vector": encode(gaussian(64), "int4_g32"),
    }
    assert findings(write(tmp_path / "a.safetensors", items)) == []
    json_items = {"w": encode(gaussian(3, 5), "ternary")}
    assert findings(write(tmp_path / "a.json", json_items)) == []


@pytest.mark.parametrize("fmt", few(PACKED, 12))
def test_empty_tensors_are_clean(fmt, tmp_path):
    items = {str(shape): encode(torch.zeros(shape), fmt) for shape in ((0,), (0, 256), (5, 0), (2, 0, 256))}
    assert findings(write(tmp_path / "a.safetensors", items)) == []


def test_integers_are_not_looked_at(tmp_path):
    write(tmp_path / "a.safetensors", {"i": torch.full((8,), 255, dtype=torch.uint8), "j": torch.tensor([-1])})
    assert findings(tmp_path / "a.safetensors") == []


# ---- plain numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(dtype, value, tmp_path):
    x = gaussian(64, 32).to(dtype)
    x[5, 7] = value
    x[60, 0] = value  # in another piece
    finding = only(write(tmp_path / "a.safetensors", {"up.weight": x}))
    nan = 2 if math.isnan(value) else 0
    assert finding.code == "not-finite"
    assert finding.where == "up.weight"
    assert f"{nan} NaN and {2 - nan} infinite of 2048 numbers, the first, {value}, at [5, 7]" in finding.message


@pytest.mark.parametrize("bits", [0x7F7F, 0x7F80, 0x7F81, 0x7FFF])
def test_the_last_finite_bfloat16_is_finite(bits, tmp_path):
    for sign in (0, 0x8000):
        x = torch.zeros(4, dtype=torch.int32)
        x[2] = bits | sign
        path = write(tmp_path / "a.safetensors", {"w": x.to(torch.uint16).view(torch.bfloat16)})
        assert len(findings(path)) == (bits >= 0x7F80)


def test_e8m0_and_complex_tensors(tmp_path):
    scales = torch.tensor([1, 254, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    numbers = torch.tensor([1 + 1j, complex(0, math.inf)])
    entries = {"s": scales, "c": numbers}
    from bitplan.files.safetensors import write_safetensors

    with write_safetensors(tmp_path / "a.safetensors", [(k, v.dtype, v.shape) for k, v in entries.items()]) as writer:
        for name in writer.order:
            writer.write(name, entries[name])
    result = findings(tmp_path / "a.safetensors")
    assert [(f.code, f.where) for f in result] == [("not-finite", "c"), ("not-finite", "s")]
    assert "the first, inf, at [1]" in result[0].message
    assert "1 NaN and 0 infinite of 3 numbers, the first, nan, at [2]" in result[1].message


def test_norms_have_their_own_code_by_role_alias_and_name(tmp_path):
    bad = torch.tensor([1.0, math.nan, 1.0]).bfloat16()
    for manifest, name in (
        (shipped_manifest("gpt-oss"), "block.3.attn.norm.scale"),
        (shipped_manifest("gpt-oss"), "model.layers.3.input_layernorm.weight"),
        (shipped_manifest("llama"), "blk.0.ffn_norm.weight"),
        (Manifest((Rule("^g$", "bfloat16", role="norm"),)), "g"),
        (Manifest((Rule("^nothing$", "bfloat16"),)), "final_norm.weight"),
    ):
        finding = only(write(tmp_path / "a.safetensors", {name: bad}), manifest)
        assert (finding.code, finding.where) == ("norm-not-finite", name)
        assert "at [1]" in finding.message


@pytest.mark.usefixtures("small_pieces")
def test_gguf_casts_and_plain_types(tmp_path):
    bad = gaussian(40, 32)
    bad[33, 1] = math.nan
    items = {"a": bad, "b": encode(bad, "float16"), "c": encode(bad, "bfloat16")}
    result = findings(write(tmp_path / "a.gguf", items))
    assert [f.where for f in result] == ["a", "b", "c"]
    assert all("at [33, 1]" in f.message for f in result)


def quant_bytes(kind, rows):
    """Random codes with sound float16 scales, as uint8 [rows, bytes of two blocks]."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = torch.randint(0, 256, (rows * 2, block_bytes), dtype=torch.uint8)
    for at in HALVES[kind.name]:
        raw[:, at : at + 2] = torch.tensor([0.5]).half().view(torch.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", HALVES)
def test_scales_among_the_bytes_of_blocks(name, tmp_path):
    """Each offset is proved by gguf-py: an infinity there makes the decoded numbers infinite or NaN."""
    kind = Type[name]
    raw, block_bytes = quant_bytes(kind, 8), gguf.GGML_QUANT_SIZES[kind][1]

    def check(data):
        shape = (8, 2 * gguf.GGML_QUANT_SIZES[kind][0])
        with write_gguf(tmp_path / "a.gguf", [("w", kind, shape)], {}) as writer:
            writer.write("w", data)
        return findings(tmp_path / "a.gguf")

    assert check(raw) == []
    assert bool(dequantize_rows(raw, kind).isfinite().all())
    for at in HALVES[name]:
        bad = raw.clone()
        bad[5, block_bytes + at : block_bytes + at + 2] = torch.tensor([math.inf]).half().view(torch.uint8)
        assert not bool(dequantize_rows(bad, kind)[5].isfinite().all())
        (finding,) = check(bad)
        assert finding.code == "not-finite"
        ours = f"{name.lower()}_gguf"
        assert f" of {ours} are NaN or infinite" in finding.message


# ---- scales and codes ------------------------------------------------------------------------------------------------


def damaged(fmt, part, index, value, *, shape=(64, 256), x=None):
    """An encoding with one stored item replaced by a bit pattern."""
    encoded = encode(gaussian(*shape) if x is None else x, fmt)
    tensor = encoded.parts[part]
    raw = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    raw[index] = value
    return encoded


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("name", "part", "value", "code", "text"),
    [
        ("mxfp4", "scales", 255, "scale-nan", "1 of 512 scales of mxfp4 are byte 255, NaN by OCP MX"),
        ("mxfp8_e4m3", "scales", 255, "scale-nan", "byte 255, NaN by OCP MX"),
        ("mxfp4", "scales", 254, "scale-saturated", "1 of 512 scales of mxfp4 are byte 254, the largest"),
        ("mxfp4", "scales", 0, "scale-underflow", "1 of 512 scales of mxfp4 are byte 0, the smallest"),
        ("nvfp4", "scales", 0x7F, "scale-nan", "1 of 1024 scales of nvfp4 are NaN"),
        ("nvfp4", "scales", 0, "scale-underflow", "are zero, over codes that are not zero"),
        ("fp4_u8_g128", "scales", 0, "scale-underflow", "are zero, over codes that are not zero"),
        ("int8_row", "scales", 0x7FC00000, "scale-nan", "1 of 64 scales of int8_row are NaN"),
        ("int8_g128", "scales", 0x7F800000, "scale-saturated", "are infinite"),
        ("int8_g128", "scales", -0x800000, "scale-saturated", "are infinite"),
        ("int4_g32", "scales", 0x7FC0, "scale-nan", "are NaN"),
        ("int4_g32", "scales", 0, "scale-underflow", "are zero"),
        ("fp8_e4m3_row", "scales", 0, "scale-underflow", "are zero"),
        ("q8_0_gguf", "scales", 0x7C00, "scale-saturated", "are infinite"),
        ("q8_0_gguf", "scales", 127, "scale-underflow", "subnormal and off by half a step or more"),
        ("q4_0_gguf", "scales", 8, "scale-underflow", "subnormal and off by half a step or more"),
        ("q4_0_gguf", "scales", 0x7E00, "scale-nan", "are NaN"),
        ("fp8_e4m3_row", "data", 0x7F, "undefined-code", "1 codes of fp8_e4m3_row stand for no number"),
        ("mxfp8_e4m3", "data", 0xFF, "undefined-code", "stand for no number"),
    ],
)
def test_each_fault_of_a_row_format(name, part, value, code, text, tmp_path):
    encoded = damaged(name, part, (40, 0), value)
    places = {"a.safetensors": {}, "a.gguf": {}} if name in GGUF_PACKED else {"a.safetensors": {}}
    for file in places:
        finding = only(write(tmp_path / file, {"w": encoded}))
        assert (finding.code, finding.where) == (code, "w")
        assert text in finding.message
        assert "block [40, 0]" in finding.message


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("file", ["a.safetensors", "a.gguf"])
def test_the_first_of_faults_in_two_pieces_is_named(file, tmp_path):
    encoded = damaged("q8_0_gguf", "scales", (5, 3), 0x7E00)
    encoded.scales[60, 1] = torch.nan
    message = only(write(tmp_path / file, {"w": encoded})).message
    assert "2 of 512 scales of q8_0_gguf are NaN, the first at block [5, 3]" in message


@pytest.mark.parametrize(("name", "pattern"), [("q8_0_gguf", 128), ("q4_0_gguf", 9)])
def test_the_first_float16_scale_that_is_fine_enough(name, pattern, tmp_path):
    assert findings(write(tmp_path / "a.gguf", {"w": damaged(name, "scales", (1, 1), pattern)})) == []


def test_the_least_code_of_q8_0_is_a_number_that_rounding_with_statistics_writes(tmp_path):
    assert findings(write(tmp_path / "a.gguf", {"w": damaged("q8_0_gguf", "data", (40, 0), 128)})) == []


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp4_u8_g128", "int8_row"])
def test_scales_at_an_end_over_zeros_are_zero_blocks(name, tmp_path):
    x = gaussian(4, 128)
    x[2] = 0.0
    assert findings(write(tmp_path / "a.safetensors", {"w": damaged(name, "scales", 2, 0, x=x)})) == []


@pytest.mark.parametrize(
    ("name", "part", "value", "code"),
    [
        ("fp8_e4m3", "data", 0x7F, "undefined-code"),
        ("fp8_e5m2", "data", 0x7C, "undefined-code"),
        ("ternary", "data", 0b10, "undefined-code"),
        ("fp8_e4m3_b128", "data", 0xFF, "undefined-code"),
        ("fp8_e4m3_b128", "scales", 0x7FC00000, "scale-nan"),
        ("int8", "scales", 0, "scale-underflow"),
        ("uint8", "scales", 0, "scale-underflow"),
        ("int64", "scales", 0x7FF8000000000000, "scale-nan"),
    ],
)
def test_formats_that_come_whole(name, part, value, code, tmp_path):
    fmt = get_format(name)
    dimensions = len(fmt.part_shapes((256, 256))[part][1])
    finding = only(
        write(tmp_path / "a.safetensors", {"w": damaged(name, part, (0,) * dimensions, value, shape=(256, 256))})
    )
    assert finding.code == code


@pytest.mark.parametrize("part", ["scales", "data"])
def test_the_tile_is_named(part, tmp_path):
    index = {"scales": (1, 2), "data": (130, 257)}[part]
    encoded = damaged("fp8_e4m3_b128", part, index, {"scales": 0x7FC00000, "data": 0x7F}[part], shape=(256, 384))
    assert "block [1, 2]" in only(write(tmp_path / "a.safetensors", {"w": encoded})).message


def test_zero_blocks_beside_faults_do_not_hide_them(tmp_path):
    x = with_zero_blocks(8, 256)
    x[5, 64:96] = 0.0
    encoded = encode(x, "mxfp4")
    encoded.scales[6, 3] = 0
    finding = only(write(tmp_path / "a.safetensors", {"w": encoded}))
    assert finding.code == "scale-underflow"
    assert "1 of 64 scales of mxfp4 are byte 0, the smallest" in finding.message
    assert "block [6, 3]" in finding.message


def test_int8_rows_may_hold_minus_128(tmp_path):
    """Rules that clip write it; only Q8_0 leaves no choice of rule."""
    assert findings(write(tmp_path / "a.safetensors", {"w": damaged("int8_row", "data", (0, 0), 128)})) == []


@pytest.mark.parametrize("name", ["nvfp4", "fp4_u8_g128"])
@pytest.mark.parametrize(("blocks", "clipped", "result"), [(50, 1, 0), (50, 2, 1), (200, 2, 0), (200, 3, 1)])
def test_clipped_scales_are_a_finding_from_two_blocks_and_one_percent_on(name, blocks, clipped, result, tmp_path):
    fmt = get_format(name)
    width = fmt.block.cols
    x = torch.zeros(blocks, width)
    x[:, 0] = 6.0
    x[:clipped, : width // 2] = 6 * 448.0  # half of the block beyond what base 1 / 256 can reach
    encoded = encode(x, fmt, base=1 / 256)
    got = findings(write(tmp_path / "a.safetensors", {"w": encoded}))
    assert [f.code for f in got] == ["scale-saturated"] * result
    if result:
        assert f"{clipped} of {blocks} scales of {name} are {fmt.scales.largest:.0f}, the largest" in got[0].message


@pytest.mark.parametrize("base", [math.nan, math.inf, -1.0])
def test_a_base_that_is_no_scale(base, tmp_path):
    encoded = encode(gaussian(4, 128), "nvfp4")
    encoded.base.fill_(base)
    finding = only(write(tmp_path / "a.safetensors", {"w": encoded}))
    assert finding.code == "scale-base"
    assert str(base) in finding.message


def test_a_file_may_have_many_faults(tmp_path):
    encoded = damaged("mxfp4", "scales", (3, 2), 255)
    encoded.scales[5, 1], encoded.scales[5, 2], encoded.scales[6] = 255, 254, 0
    result = findings(
        write(tmp_path / "a.safetensors", {"b": encoded, "a10": torch.tensor(math.nan), "a9": torch.tensor(math.inf)})
    )
    assert [(f.code, f.where) for f in result] == [
        ("not-finite", "a9"),
        ("not-finite", "a10"),
        ("scale-nan", "b"),
        ("scale-saturated", "b"),
        ("scale-underflow", "b"),
    ]
    assert "the first, inf, at []" in result[0].message
    assert "2 of 512 scales of mxfp4 are byte 255, NaN by OCP MX, the first at block [3, 2]" in result[2].message
    assert "8 of 512" in result[4].message


# ---- gpt-oss's pairs -------------------------------------------------------------------------------------------------


def pair(name, experts=3, rows=8, cols=64):
    """Blocks and scales as gpt-oss has them, and the mxfp4 they came from."""
    encoded = encode(gaussian(experts, rows, cols), "mxfp4")
    stem = name.removesuffix("blocks")
    blocks = encoded.data.reshape(experts, rows, cols // 32, 16)
    return {name: blocks, f"{stem}scales": encoded.scales.clone()}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", [BLOCKS, HF_BLOCKS])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_pairs_under_both_namings(name, dtype, tmp_path):
    manifest, tensors = shipped_manifest("gpt-oss"), pair(name)
    scales = next(key for key in tensors if key.endswith("scales"))
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors | {scales: tensors[scales].view(dtype)}, path)
    assert findings(path, manifest) == []
    tensors[scales][2, 5, 1] = 255
    safetensors.torch.save_file(tensors | {scales: tensors[scales].view(dtype)}, path)
    finding = only(path, manifest)
    assert (finding.code, finding.where) == ("scale-nan", name)
    assert "1 of 48 scales of mxfp4 are byte 255, NaN by OCP MX, the first at block [2, 5, 1]" in finding.message


def test_shards(tmp_path):
    tensors = pair(BLOCKS)
    tensors[SCALES][1, 0, 0] = 0
    safetensors.torch.save_file({BLOCKS: tensors[BLOCKS]}, tmp_path / "one.safetensors")
    safetensors.torch.save_file({SCALES: tensors[SCALES]}, tmp_path / "two.safetensors")
    index = {"weight_map": {BLOCKS: "one.safetensors", SCALES: "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    finding = only(tmp_path, shipped_manifest("gpt-oss"))
    assert finding.code == "scale-underflow"
    assert "block [1, 0, 0]" in finding.message


def test_pairs_that_do_not_fit_are_left_to_the_header_checks(tmp_path):
    tensors = pair(BLOCKS)
    for scales in (tensors[SCALES][:, :-1].contiguous(), None):
        result = {BLOCKS: tensors[BLOCKS]} | ({} if scales is None else {SCALES: scales})
        safetensors.torch.save_file(result, tmp_path / "a.safetensors")
        assert findings(tmp_path / "a.safetensors", shipped_manifest("gpt-oss")) == []


@pytest.mark.parametrize("base", [0.5, "tensor"])
def test_pairs_with_a_base(base, tmp_path):
    document = {
        "version": 1,
        "formats": {"FP4": {}, "UE8": {}},
        "patterns": [
            {"regex": ".*blocks", "format": "FP4"},
            {"regex": ".*scales", "format": "UE8"},
            {"regex": ".*", "format": "float32"},
        ],
        "block_size": 128,
        "scale_encoding": "linear_uint8",
        "scale_base": base,
    }
    manifest, encoded = Manifest.from_document(document), encode(gaussian(4, 256), "fp4_u8_g128")
    tensors = {"w.blocks": encoded.data, "w.scales": encoded.scales, "w.base": encoded.base}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path)
    assert findings(path, manifest) == []
    tensors["w.scales"][3, 1] = 0
    safetensors.torch.save_file(tensors, path)
    assert only(path, manifest).code == "scale-underflow"
    del tensors["w.base"]
    safetensors.torch.save_file(tensors, path)
    # A base that is nowhere is a finding of the headers, and there is nothing to decode.
    assert [f.code for f in findings(path, manifest)] == ([] if base == "tensor" else ["scale-underflow"])


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """(what, bytes) of every read of a file."""
    seen = []
    original = ContainerFile._read_exactly

    def spy(self, what, offset, nbytes):
        seen.append((what, nbytes))
        return original(self, what, offset, nbytes)

    monkeypatch.setattr(ContainerFile, "_read_exactly", spy)
    return seen


@pytest.mark.usefixtures("small_pieces")
def test_no_piece_is_larger_than_the_limit(tmp_path, reads):
    items = {
        "p": gaussian(64, 16),
        "m": encode(gaussian(64, 256), "mxfp4"),
        "f": encode(gaussian(64, 64), "fp8_e4m3_row"),
    }
    write(tmp_path / "a.safetensors", items)
    write(tmp_path / "a.gguf", {"p": gaussian(64, 16), "q": encode(gaussian(64, 64), "q8_0_gguf")})
    for path in ("a.safetensors", "a.gguf"):
        assert findings(tmp_path / path) == []
    sizes = [nbytes for what, nbytes in reads if what.startswith("tensor")]
    assert len(sizes) > 10
    assert max(sizes) <= 1024


def test_codes_of_sound_experts_are_not_read(tmp_path, reads):
    tensors = pair(BLOCKS)
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    assert findings(tmp_path / "a.safetensors", shipped_manifest("gpt-oss")) == []
    assert [what for what, _ in reads if what.startswith("tensor")] == [f"tensor {SCALES!r}"]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("bad", [False, True])
def test_progress_adds_up_to_the_file(bad, tmp_path):
    tensors = pair(BLOCKS) | {"norm.scale": gaussian(700), "ids": torch.arange(5)}
    if bad:
        tensors["norm.scale"][3], tensors[SCALES][0, 0, 0] = math.nan, 255
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    message = []
    findings(
        tmp_path / "a.safetensors",
        shipped_manifest("gpt-oss"),
        on_bytes=lambda count, name: message.append((name, count)),
    )
    by_name = {name: sum(count for other, count in message if other == name) for name in tensors}
    assert by_name == {name: tensor.nbytes for name, tensor in tensors.items()}
    assert min(count for _, count in message) >= 0


@pytest.mark.parametrize(("offset", "shape", "index"), [(0, (), []), (5, (2, 3), [1, 2]), (7, (2, 2, 3), [1, 0, 1])])
def test_places(offset, shape, index):
    assert index_of(offset, shape) == index
    if shape:
        assert index == [int(i) for i in np.unravel_index(offset, shape)]
