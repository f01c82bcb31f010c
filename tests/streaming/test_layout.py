"""Block layouts: every format in and out of one flat buffer, without overlap and aligned."""

from __future__ import annotations

import pytest
import torch

from bitplan import decode, encode, get_format
from bitplan.base.errors import FormatError
from bitplan.plan import Manifest
from bitplan.streaming.find_blocks import ALIGNMENT, ParameterSpec, lay_out
from bitplan.streaming.options import resolve_formats

SPECS = {
    "q.weight": ParameterSpec((8, 256), torch.bfloat16),
    "k.weight": ParameterSpec((3, 128), torch.bfloat16),
    "norm.weight": ParameterSpec((7,), torch.float32),
    "kernel": ParameterSpec((4, 2, 16), torch.float32),
    "scalar": ParameterSpec((), torch.float32),
}
FORMATS = ["bfloat16", "float32", "int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4", "nvfp4"]


def len_of(layout):
    return sum(piece.nbytes for piece in layout.pieces.values())


@pytest.mark.parametrize(("first", "second"), [*zip(FORMATS, FORMATS[1:] + FORMATS[:1], strict=True)])
def test_every_format_lives_in_one_buffer(first, second):
    names = {
        "q.weight": first,
        "k.weight": second,
        "norm.weight": "float32",
        "kernel": "int8_row",
        "scalar": "bfloat16",
    }
    formats = {name: get_format(fmt) for name, fmt in names.items()}
    layout = lay_out(SPECS, formats)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(spec.shape, generator=generator).to(spec.dtype) for name, spec in SPECS.items()}
    slot = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    scratch = torch.full((layout.scratch_nbytes,), 0xFF, dtype=torch.uint8)
    for name, piece in layout.pieces.items():
        piece.write(slot, encode(values[name], piece.fmt))
    layout.decode_into(slot, scratch)
    taken: set[int] = set()
    own = {name for name, piece in layout.pieces.items() if piece.is_own_type}
    assert own == {name for name in SPECS if names[name] == str(SPECS[name].dtype).removeprefix("torch.")}
    # Norms alone, of a block that is decoded otherwise, are copied, and the slot is free then.
    assert layout.leaves_slot == (sum(SPECS[name].nbytes for name in own) * 16 <= len_of(layout))
    for name, piece in layout.pieces.items():
        weight = piece.weight(slot, scratch)
        assert torch.equal(weight, decode(encode(values[name], piece.fmt), SPECS[name].dtype)), name
        assert (piece.decoded is None) == (name in own and not layout.leaves_slot)
        for part in piece.parts.values():
            span = set(range(part.offset, part.offset + part.nbytes))
            assert part.offset % ALIGNMENT == 0
            assert not taken & span
            taken |= span
    assert layout.nbytes == sum(layout.bytes_by_format.values())
    assert layout.nbytes % ALIGNMENT == 0
    assert len(taken) == sum(formats[name].nbytes(spec.shape) for name, spec in SPECS.items())


@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.cross("fmt", ["int8_row", "fp8_e4m3_row", "int8_g128", "mxfp4", "nvfp4", "fp8_e4m3_b128"])
def test_triton_decodes_into_the_scratch(fmt, dtype):
    """Triton's interpreter on a CPU, the kernel itself on a GPU."""
    pytest.importorskip("triton")
    from bitplan.formats.triton_codec import DECODERS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoded = encode(torch.randn(3, 256, generator=torch.Generator().manual_seed(0)), fmt).to(device)
    scratch = torch.full((5, 256), float("nan"), dtype=dtype, device=device)
    assert DECODERS[fmt](encoded, dtype, out=scratch[1:4]).data_ptr() == scratch[1].data_ptr()
    assert torch.equal(scratch[1:4], decode(encoded, dtype))
    assert scratch[[0, 4]].isnan().all()
    for other in (scratch, scratch[1:4].double(), scratch[1:4].t().contiguous().t()):
        with pytest.raises(FormatError, match="the output must be contiguous"):
            DECODERS[fmt](encoded, dtype, out=other)


def test_int8_takes_at_most_0_52_of_bfloat16_for_a_llama_block():
    shapes = {f"{name}.weight": (4096, 4096) for name in "qkvo"}
    shapes |= {"up.weight": (11008, 4096), "gate.weight": (11008, 4096), "down.weight": (4096, 11008), "norm": (4096,)}
    specs = {name: ParameterSpec(shape, torch.bfloat16) for name, shape in shapes.items()}
    sizes = {
        fmt: lay_out(specs, resolve_formats(fmt, {"block": specs})["block"]).nbytes
        for fmt in ("bfloat16", "int8_row", "int8_g128")
    }
    assert sizes["int8_row"] <= 0.501 * sizes["bfloat16"]
    assert sizes["int8_g128"] <= 0.52 * sizes["bfloat16"]


def test_a_manifest_or_none_decides_too():
    blocks = {"layers.0": {key: SPECS[key] for key in ("q.weight", "norm.weight")}}
    rules = [{"regex": ".*norm.*", "format": "F32"}, {"regex": ".*", "format": "mxfp4"}]
    found = resolve_formats(Manifest.from_document({"version": 1, "patterns": rules}), blocks)
    assert {name: fmt.name for name, fmt in found["layers.0"].items()} == {
        "q.weight": "mxfp4",
        "norm.weight": "float32",
    }
    again = resolve_formats({"layers.0.q": None}, blocks, found)
    assert again["layers.0"]["q.weight"].name == "bfloat16"  # its own type, as before any format
    assert resolve_formats({"layers.0.norm.weight": "bfloat16"}, blocks, found)["layers.0"]["q.weight"].name == "mxfp4"


def test_which_key_decides():
    blocks = {"layers.0": SPECS, "layers.1": SPECS}
    result = resolve_formats(
        {"layers.0.norm.weight": "bfloat16", "layers.1": "mxfp4", "*.q.weight": "int8_row"},
        {name: {key: specs[key] for key in ("q.weight", "k.weight", "norm.weight")} for name, specs in blocks.items()},
    )
    named = {f"{block}.{name}": fmt.name for block, own in result.items() for name, fmt in own.items()}
    assert named == {
        "layers.0.q.weight": "int8_row",
        "layers.0.k.weight": "bfloat16",
        "layers.0.norm.weight": "bfloat16",
        "layers.1.q.weight": "mxfp4",
        "layers.1.k.weight": "mxfp4",
        "layers.1.norm.weight": "float32",
    }
