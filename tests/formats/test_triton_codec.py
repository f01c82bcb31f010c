"""Triton codecs against the reference, bit for bit: every code, every bfloat16, ties and their neighbours, edges."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from bitplan.formats.format import Format

triton = pytest.importorskip("triton")
if not (triton.knobs.runtime.interpret or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from bitplan.formats import triton_codec as triton_decode  # noqa: E402
from bitplan.formats import triton_encode  # noqa: E402
from bitplan.formats.triton_codec import DECODERS, ENCODERS, Launch  # noqa: E402
from tests.crosses import few  # noqa: E402

# Under the interpreter numpy does the arithmetic, and warns where a GPU gives infinity, NaN or zero without a word.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:underflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROW_FORMATS = ("int8_row", "fp8_e4m3_row")
GROUP_ENCODERS = tuple(name for name in ENCODERS if name not in ROW_FORMATS)
# The largest |x| whose scale still fits in float16.
LARGEST = {"q8_0_gguf": 127.0 * 65504, "q4_0_gguf": 8.0 * 65504}


def bits(tensor: Tensor) -> Tensor:
    """Raw bits; every NaN as one, since processors differ in theirs."""
    tensor = tensor.cpu().contiguous()
    raw = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    if not tensor.is_floating_point():
        return raw
    return torch.where(tensor.float().isnan(), -1 if tensor.itemsize > 1 else 127, raw)


def assert_encodes(x: Tensor, name: str, device: torch.device, launch: Launch | None = None) -> None:
    fmt = get_format(name)
    expected = encode(x, fmt)
    assert expected.scales is not None
    data, scales = ENCODERS[name](x.to(device).reshape(fmt.matrix_shape(tuple(x.shape))), fmt, launch)
    assert data.dtype == expected.data.dtype
    assert scales.dtype == expected.scales.dtype
    assert torch.equal(bits(scales), bits(expected.scales).reshape(scales.shape))
    assert torch.equal(bits(data), bits(expected.data).reshape(data.shape))


def assert_decodes(
    encoded: Encoded,
    device: torch.device,
    launch: Launch | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    for dtype in dtypes:
        values = DECODERS[encoded.fmt.name](encoded.to(device), dtype, launch)
        assert values.dtype == dtype
        assert torch.equal(bits(values), bits(decode(encoded, dtype)))


def few_programs(device: torch.device) -> Launch | None:
    """The interpreter pays for programs, not for numbers."""
    return Launch(2**15, 4) if device.type == "cpu" else None


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose size varies from row to row, with zero runs of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.randn(*shape[:-1], 1, generator=generator).exp()
    x[0, : shape[-1] // 2] = 0.0
    x[-1, shape[-1] // 2 :] = -0.0
    return x


# ---- encode ----------------------------------------------------------------------------------------------------------


@pytest.mark.cross("dtype", FLOATS, ids=str)
@pytest.mark.cross("name", GROUP_ENCODERS)
@pytest.mark.cross(("rows", "cols"), [(1, 128), (3, 384), (129, 256)])
def test_groups_of_any_number(name: str, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_encodes(gaussian(rows, cols).to(dtype), name, device)


@pytest.mark.cross("dtype", FLOATS, ids=str)
@pytest.mark.cross("name", ROW_FORMATS)
@pytest.mark.cross(
    ("rows", "cols"), [(1, 1), (129, 5), (3, 100), (3, 4096), (2, 5000), (2, triton_encode.LONGEST_ROW_HELD + 3616)]
)
def test_rows_of_any_length(name: str, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_encodes(gaussian(rows, cols).to(dtype), name, device)


@pytest.mark.cross("name", ENCODERS)
@pytest.mark.cross("order", ["sorted", "shuffled"])
def test_every_bfloat16(name: str, order: str, device: torch.device) -> None:
    """Sorted, each number lies near the top of its block; shuffled, beside numbers of every size."""
    x = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.isfinite() & (x.float().abs() <= LARGEST.get(name, math.inf)), x, 0.0)
    if order == "sorted":
        x = x[x.float().abs().argsort(stable=True)]
    else:
        x = x[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    assert_encodes(x.reshape(512, 128), name, device, few_programs(device))


@pytest.mark.parametrize("name", few(ENCODERS, 4))
def test_ties_and_their_neighbours(name: str, device: torch.device) -> None:
    """A block that holds the largest code's number has a power-of-two scale, so midpoints of codes are exact ties."""
    top, ties = ties_of(get_format(name))
    around = torch.stack([ties.nextafter(torch.zeros(())), ties, ties.nextafter(torch.full((), torch.inf))]).flatten()
    around = torch.cat([around, -around])
    row = torch.nn.functional.pad(around, (0, -len(around) % 31))
    blocks = torch.cat([torch.full((len(row) // 31, 1), top), row.reshape(-1, 31)], dim=1)  # groups of 32
    blocks = torch.nn.functional.pad(blocks, (0, (get_format(name).block.cols or 32) - 32))
    exponents = (-23, -14, 0, 12) if name in LARGEST else (-149, -140, -133, -126, -120, -30, 0, 60, 118)
    x = torch.cat([blocks * 2.0**e if e > -127 else blocks * 2.0**-100 * 2.0 ** (e + 100) for e in exponents])
    assert_encodes(x[x.isfinite().all(dim=1)], name, device)
    for dtype in (torch.float16, torch.bfloat16):
        assert_encodes(blocks.to(dtype), name, device)


def ties_of(fmt: Format) -> tuple[float, Tensor]:
    """The number of the code that a block's extreme gets, at scale 1, and the midpoints between codes."""
    assert fmt.element is not None
    if fmt.name == "q4_0_gguf":
        return -8.0, torch.arange(8) + 0.5
    codes = torch.arange(8 if fmt.element.name == "e2m1" else 127, dtype=torch.uint8)
    if fmt.element.name in ("int8", "int4"):
        values = torch.arange(fmt.element.limit + 1)
    else:
        values = fmt.element.value(codes.view(fmt.element.codes))
    beyond = values[-1] * torch.tensor([1.01, 1.04, 1.08, 1.14]) if fmt.power_of_two_scales else values[:0]
    return float(values[-1]), torch.cat([(values[:-1] + values[1:]) / 2, values, beyond])


@pytest.mark.parametrize("name", ENCODERS)
def test_small_blocks_of_float32(name: str, device: torch.device) -> None:
    """Blocks from all zero through subnormal to where scales are no longer flushed, random below their largest."""
    generator = torch.Generator().manual_seed(2)
    largest = torch.tensor([0.0, 2.0**-149, 2.0**-130, 127 * 2.0**-127, 127 * 2.0**-126, 2.0**-110, 2.0**-24])
    x = (torch.rand(len(largest), 256, generator=generator) * 2 - 1) * largest[:, None]
    x[:, ::128] = largest[:, None]
    assert_encodes(x, name, device)
    assert_encodes(-x, name, device)


@pytest.mark.parametrize("name", ["int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4", "mxfp8_e4m3", "int4_g32"])
def test_the_largest_numbers(name: str, device: torch.device) -> None:
    x = gaussian(4, 256)
    x = x / x.abs().amax(dim=1, keepdim=True) * torch.finfo(torch.float32).max
    assert bool((x.abs() == torch.finfo(torch.float32).max).any())  # here int8 scales are one step smaller
    assert_encodes(x, name, device)


@pytest.mark.cross("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.cross("dtype", FLOATS, ids=str)
@pytest.mark.cross("name", ENCODERS)
def test_what_is_not_finite_shows_in_its_scale_alone(
    name: str, dtype: torch.dtype, bad: float, device: torch.device
) -> None:
    fmt = get_format(name)
    assert fmt.scales is not None
    x = gaussian(4, 256).to(dtype)
    x[1, 200] = bad
    _, scales = ENCODERS[name](x.to(device), fmt)
    wrong = ~fmt.scales.load(scales.cpu(), None).isfinite()
    expected = torch.zeros_like(wrong)
    expected[1, 200 // (fmt.block.cols or 256)] = True
    assert torch.equal(wrong, expected)


def test_the_first_of_two_extremes_gives_q4_0_its_sign(device: torch.device) -> None:
    x = torch.zeros(8, 32)
    x[0, 3], x[0, 20] = 2.0, -2.0
    x[1, 3], x[1, 20] = -2.0, 2.0
    x[2, 17], x[2, 5] = -2.0, 2.0
    x[3, 1:] = -0.0
    x[4] = -0.0
    x[5, 0] = -0.0
    assert_encodes(x, "q4_0_gguf", device)


def test_pairs_that_start_between_words(device: torch.device) -> None:
    """A slice at an odd place cannot be read two numbers at a time."""
    x = gaussian(2, 64).to(torch.bfloat16)
    fmt = get_format("mxfp4")
    shifted = torch.cat([x.new_zeros(1), x.flatten()]).to(device)[1:].view(2, 64)
    data, scales = ENCODERS["mxfp4"](shifted, fmt)
    expected = encode(x, fmt)
    assert torch.equal(data.cpu(), expected.data)
    assert torch.equal(scales.cpu(), expected.scales)


# ---- decode ----------------------------------------------------------------------------------------------------------


def scale_patterns(dtype: torch.dtype) -> Tensor:
    """All scales of one byte; of the wider ones the edges, and 120 spread over all exponents."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, math.nan, 2.0**-149, 2.0**-126, 2.0**-127, 3e38, -1e-40])
    spread = torch.linspace(-2.0, 2.0, 120).sign() * torch.linspace(-126, 127, 120).exp2() * 1.37
    return torch.cat([edges, spread]).to(dtype)


def every_code(fmt: Format) -> Iterator[Encoded]:
    """Every data byte under every scale pattern, one pattern a row."""
    assert fmt.scales is not None
    scales = scale_patterns(fmt.scales.dtype)
    per_byte = 1 if fmt.packing is None else fmt.packing.per_byte
    data = torch.arange(256, dtype=torch.uint8).view(fmt.storage).expand(len(scales), 256).contiguous()
    shape = (len(scales), 256 * per_byte)
    bases = [torch.tensor(b) for b in (0.37, 2.0**-120)] if fmt.scales.needs_base else [None]
    for base in bases:
        yield Encoded(fmt, shape, data, scales[:, None].expand(fmt.grid(shape)).contiguous(), base)


@pytest.mark.parametrize("name", few([name for name in DECODERS if name != "fp8_e4m3_b128"], 5))
def test_every_code_under_many_scales(name: str, device: torch.device) -> None:
    for encoded in every_code(get_format(name)):
        assert_decodes(encoded, device, few_programs(device))


@pytest.mark.parametrize("shape", [(1, 5), (129, 100), (130, 300)])
def test_tiles_with_ragged_edges(shape: tuple[int, int], device: torch.device) -> None:
    fmt = get_format("fp8_e4m3_b128")
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    scales = torch.rand(fmt.grid(shape), generator=generator)
    assert_decodes(Encoded(fmt, shape, data, scales), device)


@pytest.mark.cross("name", ROW_FORMATS)
@pytest.mark.cross(("rows", "cols"), [(1, 1), (129, 5), (3, 100), (2, 4096), (2, 9999)])
def test_decoded_rows_of_any_length(name: str, rows: int, cols: int, device: torch.device) -> None:
    assert_decodes(encode(gaussian(rows, cols), name), device)


@pytest.mark.parametrize("name", DECODERS)
def test_shapes_come_back(name: str, device: torch.device) -> None:
    assert_decodes(encode(gaussian(2, 3, 128), name), device)


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.cross("launch", [Launch(1024, 1), Launch(2048, 2, 4), Launch(8192, 8, 16)], ids=str)
@pytest.mark.cross("name", few(DECODERS, 5))
def test_the_launch_changes_nothing(name: str, launch: Launch, device: torch.device) -> None:
    x = gaussian(3, 640).to(torch.bfloat16)
    if name in ENCODERS:
        assert_encodes(x, name, device, launch)
    assert_decodes(encode(x, name), device, launch, dtypes=(torch.bfloat16,))


@pytest.mark.cross("shape", [(0, 128), (3, 0), (0, 0)])
@pytest.mark.cross("name", DECODERS)
def test_nothing_to_do(name: str, shape: tuple[int, int], device: torch.device) -> None:
    x = torch.empty(shape)
    if name in ENCODERS:
        assert_encodes(x, name, device)
    assert_decodes(encode(x, name), device)


def test_what_the_kernels_do_not_take(device: torch.device) -> None:
    mxfp4 = get_format("mxfp4")
    with pytest.raises(FormatError, match=r"whole blocks of 32, got rows of 33"):
        ENCODERS["mxfp4"](torch.ones(1, 33, device=device), mxfp4)
    with pytest.raises(FormatError, match=r"whole blocks of 32, got rows of 33"):
        DECODERS["mxfp4"](encode(torch.ones(1, 33), mxfp4, pad="zero").to(device), torch.float32)
    with pytest.raises(FormatError, match=r"got torch\.float64"):
        ENCODERS["mxfp4"](torch.ones(1, 32, dtype=torch.float64, device=device), mxfp4)


# ---- what only a GPU can show ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_e4m3_row", "mxfp8_e4m3"])
def test_integers_round_e4m3_as_the_instruction_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs before 8.9 and the interpreter have no such instruction; here both ways run on one GPU."""
    device = torch.device("cuda")
    for in_integers in (False, True):
        if in_integers:
            monkeypatch.setattr("bitplan.formats.triton_numbers.has_e4m3_instructions", lambda _: False)
        test_every_bfloat16(name, "sorted", device)
        test_ties_and_their_neighbours(name, device)
        test_every_code_under_many_scales(name, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in ENCODERS if name in DECODERS])
def test_more_than_two_to_the_31_numbers(name: str) -> None:
    """The last rows of a matrix whose offsets need 64 bits are coded as they are alone."""
    fmt, cols = get_format(name), 16384
    rows = 2**31 // cols + 3
    x = torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")
    data, scales = ENCODERS[name](x, fmt)
    last = x[-3:].clone()
    few, few_scales = ENCODERS[name](last, fmt)
    assert torch.equal(bits(data[-3:]), bits(few))
    assert torch.equal(bits(scales[-3:]), bits(few_scales))
    assert_encodes(last.cpu(), name, torch.device("cuda"))
    parts = fmt.part_shapes((rows, cols))
    encoded = Encoded(fmt, (rows, cols), data.reshape(parts["data"][1]), scales.reshape(parts["scales"][1]))
    del x, last
    values = DECODERS[name](encoded, torch.bfloat16)[-3:]
    assert torch.equal(bits(values), bits(decode(encode_of(fmt, few, few_scales), torch.bfloat16)))


def encode_of(fmt: Format, data: Tensor, scales: Tensor) -> Encoded:
    shape = (data.shape[0], data.shape[1] * (1 if fmt.packing is None else fmt.packing.per_byte))
    return Encoded(fmt, shape, data.cpu(), scales.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODERS)
def test_a_matrix_that_fills_the_gpu(name: str) -> None:
    x = gaussian(1000, 2176)
    if name in ENCODERS:
        for dtype in FLOATS:
            assert_encodes(x.to(dtype), name, torch.device("cuda"))
    assert_decodes(encode(x, name), torch.device("cuda"))


def test_settings_are_powers_of_two() -> None:
    launches = [value for part in (triton_encode, triton_decode) for value in vars(part).values()]
    for launch in (value for value in launches if isinstance(value, Launch)):
        assert math.log2(launch.numbers).is_integer()
        assert math.log2(launch.warps).is_integer()


@pytest.mark.parametrize("name", ["int8_row", "int8_g128", "mxfp4", "nvfp4", "fp4_u8_g128"])
def test_a_bound_call_passes_the_launcher_what_a_prepared_launch_does(name: str, monkeypatch) -> None:
    """On a pretended GPU: the same grid, stream, constants and addresses, but for that of the output."""
    encoded, passed = encode(torch.randn(4, 256), name), []
    empty = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(triton_decode, "current_device", lambda: -1)
    monkeypatch.setattr(triton_decode, "current_stream", lambda _: 7)
    monkeypatch.setattr(triton_decode, "empty_on_gpu", empty)
    prepared = triton_decode.decode_launch(encoded, torch.float32)
    compute = torch.nn.functional.linear
    assert triton_decode.bind_with_numbers(encoded, torch.float32, compute, None) is None  # nothing was compiled
    monkeypatch.setitem(prepared._compiled, -1, (lambda *given: passed.append(given), ("function", "metadata"), None))
    product = triton_decode.bind_with_numbers(encoded, torch.float32, compute, None)
    assert product is not None
    x = torch.randn(1, 3, 256)
    assert product(x, None).shape == (1, 3, 4)
    out = torch.empty(4, 256)
    base = () if encoded.fmt.packing is None else (encoded.scales if encoded.base is None else encoded.base,)
    pointers = (encoded.data, encoded.scales, *base)
    bound = prepared.bind(-1)
    assert bound is not None
    bound(7, *[each.data_ptr() for each in (*pointers, out)])
    assert [given != out.data_ptr() for given in passed[1]].count(False) == 1
    where = passed[1].index(out.data_ptr())
    assert passed[0][:where] == passed[1][:where]
    assert passed[0][where + 1 :] == passed[1][where + 1 :]
    monkeypatch.setattr(triton_decode, "current_device", lambda: 0)
    assert product(x, None) is None
