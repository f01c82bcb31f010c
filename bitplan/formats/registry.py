"""The table of formats: 21 dtypes of at most one scale per tensor, and the block formats of files and kernels."""

from __future__ import annotations

import re

from bitplan.base.errors import FormatError, did_you_mean
from bitplan.formats import elements as el
from bitplan.formats.elements import Element, Packing
from bitplan.formats.format import ROW, TENSOR, Block, Format
from bitplan.formats.gguf.blocks import GgufMxfp4, GgufPowerOfTwoScales, GgufQ40, GgufQ80, gguf_blocks, gguf_vectors
from bitplan.formats.scale_rules import BasedScales, PowerOfTwoScales, ScaleRule, ScaleStorage

_F32 = ScaleStorage("float32")
_F64 = ScaleStorage("float64")
_F16 = ScaleStorage("float16")
_BF16 = ScaleStorage("bfloat16")
_E8M0 = PowerOfTwoScales()
_NIBBLES = Packing(4, "low_first")
_GGUF_NIBBLES = Packing(4, "halves")


def _cast(name: str, dtype: str, text: str) -> Format:
    return Format(name, f"{text}; a plain cast, as torch's", dtype)


def _scaled(
    element: Element, name: str, text: str, packing: Packing | None = None, rule: ScaleRule = "absmax"
) -> Format:
    """A format of one scale for the whole tensor, codes packed in the bit order of poly's network JSON."""
    wide = element.bits >= 32 and "int" in element.name
    return Format(
        name,
        text,
        element.codes_name if packing is None else "uint8",
        element,
        TENSOR,
        _F64 if wide else _F32,
        packing,
        rule,
        zero_point=element.name.startswith("uint"),
        work_name="float64" if wide else "float32",
        divides=True,
    )


def _signed(bits: int, dtype: str) -> Format:
    element = el.INT8 if bits == 8 else el.signed_integer(bits, dtype)
    return _scaled(
        element, f"int{bits}", f"{bits}-bit integers, one scale per tensor (max |x| / {2 ** (bits - 1) - 1})"
    )


def _unsigned(bits: int, dtype: str) -> Format:
    element = el.UINT8 if bits == 8 else el.unsigned_integer(bits, dtype)
    return _scaled(element, f"uint{bits}", f"unsigned {bits}-bit integers, one scale and zero point per tensor")


def _int4_groups(size: int) -> Format:
    return Format(
        f"int4_g{size}",
        f"4-bit integers stored as q + 8, even index in the low nibble, one bfloat16 scale per {size} (max |x| / 7)",
        "uint8",
        el.INT4,
        Block(1, size),
        _BF16,
        Packing(4, "low_first", signed=True, offset=8),
    )


def _high_first(bits: int, *, signed: bool = False) -> Packing:
    return Packing(bits, "high_first", signed=signed)


_DTYPES = (
    _cast("float64", "float64", "IEEE double"),
    _cast("float32", "float32", "IEEE single"),
    _cast("float16", "float16", "IEEE half"),
    _cast("bfloat16", "bfloat16", "8 exponent bits, 7 mantissa bits"),
    _scaled(el.E4M3, "fp8_e4m3", "OCP FP8 E4M3 (largest 448, no infinity), one scale per tensor"),
    _scaled(el.E5M2, "fp8_e5m2", "OCP FP8 E5M2 (largest 57344), one scale per tensor"),
    _signed(64, "int64"),
    _signed(32, "int32"),
    _signed(16, "int16"),
    _signed(8, "int8"),
    _unsigned(64, "uint64"),
    _unsigned(32, "uint32"),
    _unsigned(16, "uint16"),
    _unsigned(8, "uint8"),
    _scaled(el.INT4, "int4", "4-bit integers -8..7, one scale per tensor", _high_first(4, signed=True)),
    _scaled(el.UINT4, "uint4", "unsigned 4-bit integers, one scale and zero point per tensor", _high_first(4)),
    _scaled(el.E2M1, "fp4", "E2M1 floats (0 .5 1 1.5 2 3 4 6, signed), one scale per tensor", _high_first(4)),
    _scaled(el.INT2, "int2", "2-bit integers -2..1, one scale per tensor", _high_first(2, signed=True)),
    _scaled(el.UINT2, "uint2", "unsigned 2-bit integers, one scale and zero point per tensor", _high_first(2)),
    _scaled(el.TERNARY, "ternary", "-1, 0, 1 times max |x|", _high_first(2, signed=True)),
    _scaled(el.BINARY, "binary", "the sign times max |x|; zero counts as negative", _high_first(1)),
)

_BLOCKS = (
    Format(
        "q4_0_poly",
        "poly's Q4_0: 20 bytes per 32, float32 scale max |x| / 7, two's complement nibbles, even index low, "
        "ties away from zero",
        "uint8",
        el.INT4_HALF_AWAY,
        Block(1, 32),
        _F32,
        Packing(4, "low_first", signed=True),
        interleaved=True,
        divides=True,
    ),
    GgufQ40(
        "q4_0_gguf",
        "GGUF Q4_0: 18 bytes per 32, float16 scale (signed extreme / -8), byte j holds numbers j and j + 16",
        "uint8",
        el.INT4_ON_LOW,
        Block(1, 32),
        _F16,
        Packing(4, "halves", signed=True, offset=8),
        interleaved=True,
    ),
    GgufQ80(
        "q8_0_gguf",
        "GGUF Q8_0: 34 bytes per 32, float16 scale max |x| / 127",
        "int8",
        el.INT8_HALF_AWAY,
        Block(1, 32),
        _F16,
        interleaved=True,
    ),
    Format(
        "mxfp4",
        "OCP MXFP4 as in gpt-oss: E2M1, one E8M0 scale per 32, even index in the low nibble; scale rule OCP floor: "
        "2^(floor(log2 max|x|) - 2), numbers above 6 scales saturate",
        "uint8",
        el.E2M1,
        Block(1, 32),
        _E8M0,
        _NIBBLES,
    ),
    GgufMxfp4(
        "mxfp4_gguf",
        "GGUF MXFP4: 17 bytes per 32, scale byte first, byte j holds numbers j and j + 16; ggml's rounding",
        "uint8",
        el.E2M1,
        Block(1, 32),
        GgufPowerOfTwoScales(),
        _GGUF_NIBBLES,
        interleaved=True,
    ),
    Format(
        "mxfp8_e4m3",
        "OCP MXFP8: E4M3, one E8M0 scale per 32; scale rule OCP floor: 2^(floor(log2 max|x|) - 8)",
        "float8_e4m3fn",
        el.E4M3,
        Block(1, 32),
        _E8M0,
    ),
    Format(
        "nvfp4",
        "NVFP4: E2M1, one E4M3 scale per 16 times one float32 base per tensor (max |x| / 2688)",
        "uint8",
        el.E2M1,
        Block(1, 16),
        BasedScales("float8_e4m3fn", 448.0),
        _NIBBLES,
    ),
    Format(
        "fp4_u8_g128",
        "E2M1, one linear uint8 scale per 128 times an explicit float32 base per tensor (largest scale / 255)",
        "uint8",
        el.E2M1,
        Block(1, 128),
        BasedScales("uint8", 255.0),
        _NIBBLES,
    ),
    Format("int8_row", "8-bit integers, one float32 scale per row (max |x| / 127)", "int8", el.INT8, ROW, _F32),
    Format("int8_g128", "8-bit integers, one float32 scale per 128 in a row", "int8", el.INT8, Block(1, 128), _F32),
    Format("int8_g64", "8-bit integers, one bfloat16 scale per 64 in a row", "int8", el.INT8, Block(1, 64), _BF16),
    *(_int4_groups(size) for size in (32, 64, 128)),
    Format("fp8_e4m3_row", "E4M3, one float32 scale per row (max |x| / 448)", "float8_e4m3fn", el.E4M3, ROW, _F32),
    Format(
        "fp8_e4m3_b128",
        "E4M3, one float32 scale per 128 x 128 tile; tiles at the edges may be smaller",
        "float8_e4m3fn",
        el.E4M3,
        Block(128, 128),
        _F32,
    ),
    _scaled(
        el.TERNARY,
        "ternary_absmean",
        "-1, 0, 1 times mean |x|, one scale per tensor (BitNet b1.58)",
        _high_first(2, signed=True),
        "absmean",
    ),
    gguf_blocks("q4_1_gguf", "codes 0..15 times a float16 scale plus a float16 minimum"),
    gguf_blocks("q5_0_gguf", "codes -16..15 times a float16 scale"),
    gguf_blocks("q5_1_gguf", "codes 0..31 times a float16 scale plus a float16 minimum"),
    gguf_blocks("iq4_nl_gguf", "16 levels, dense about zero, times a float16 scale"),
    gguf_blocks("q2_k_gguf", "groups of 16 with 4-bit scales and minima of two float16 numbers, codes 0..3"),
    gguf_blocks("q3_k_gguf", "groups of 16 with 6-bit scales of a float16 number, codes -4..3"),
    gguf_blocks("q4_k_gguf", "groups of 32 with 6-bit scales and minima of two float16 numbers, codes 0..15"),
    gguf_blocks("q5_k_gguf", "groups of 32 with 6-bit scales and minima of two float16 numbers, codes 0..31"),
    gguf_blocks("q6_k_gguf", "groups of 16 with 8-bit scales of a float16 number, codes -32..31"),
    gguf_blocks("iq4_xs_gguf", "groups of 32 with 6-bit scales of a float16 number, 16 levels dense about zero"),
    gguf_vectors("iq3_s_gguf", "512 vectors of 4 numbers, free signs, 4-bit scales per 32 of a float16 number"),
    gguf_vectors("iq3_xxs_gguf", "256 vectors of 4 numbers, even signs, 4-bit scales per 32 of a float16 number"),
    gguf_vectors("iq2_s_gguf", "1024 vectors of 8 numbers, free signs, 4-bit scales per 16 of a float16 number"),
    gguf_vectors("iq2_xs_gguf", "512 vectors of 8 numbers, even signs, 4-bit scales per 16 of a float16 number"),
    gguf_vectors("iq2_xxs_gguf", "256 vectors of 8 numbers, even signs, 4-bit scales per 32 of a float16 number"),
)

_FORMATS = {fmt.name: fmt for fmt in _DTYPES + _BLOCKS}
_OTHER_NAMES = {"q8": "q8_0_gguf", "8bit": "int8_row", "q4": "q4_k_gguf", "4bit": "int4_g32", "nf4": "nvfp4"}
_OTHER_NAMES |= {"fp4": "mxfp4", "fp8": "fp8_e4m3_row", "f8": "fp8_e4m3_row"}
_OTHER_NAMES |= {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32"}
_OTHER_NAMES |= {"f32": "float32"}
_MIXES = {
    "iq3_m": "iq3_s_m",
    "iq3_xs": "iq3_s_xs",
    "iq2_m": "iq2_s_m",
}  # as if they were named for most of their tensors
DTYPE_NAMES: tuple[str, ...] = tuple(fmt.name for fmt in _DTYPES)


def get_format(name: Format | str) -> Format:
    """The format of this name; an unknown name gets a suggestion."""
    if isinstance(name, Format):
        return name
    if name not in _FORMATS:
        raise FormatError(f"no format {name!r:.60}; `bitplan inspect` lists them all{_suggestion(str(name))}")
    return _FORMATS[name]


def _suggestion(name: str) -> str:
    """A hint for a name that others use: llama.cpp's types and mixes of them (Q4_K_M), torch's and vendors' words."""
    low = name.lower().replace("-", "_")
    mix = re.fullmatch(r"(i?q\d_(?:k|nl|[01])|iq\d_(?:xxs|xs|s))(?:_(?:xs|s|m|l|xl))?", _MIXES.get(low, low))
    if mix is not None and f"{mix[1]}_gguf" in _FORMATS:
        more = "" if low == mix[1] else ", the type of most of its tensors; `bitplan search` mixes them for llama.cpp"
        return f"; llama.cpp's {name} is {mix[1] + '_gguf'!r}{more}"
    if low in _OTHER_NAMES:
        return f"; did you mean {_OTHER_NAMES[low]!r}?"
    return did_you_mean(low, _FORMATS)


def list_formats() -> list[Format]:
    """Every format: the 21 dtypes first, then the block formats."""
    return list(_FORMATS.values())
