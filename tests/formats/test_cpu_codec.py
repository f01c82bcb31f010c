"""The numba twins against the definition, bit for bit: every code, every kind of number, every shape."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bitplan import formats
from bitplan.base.errors import FormatError, NonFiniteError
from bitplan.formats import Encoded, cpu_codec, get_format
from bitplan.formats.cpu_codec import DECODERS, ENCODERS
from bitplan.formats.dispatch import explain_decode
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS
from bitplan.formats.gguf.layouts import LAYOUTS
from tests.processes import Program

SCALED = [name for name in ENCODERS if name != "bfloat16"]
MANTISSA_END = 64  # how near to a power of two the logarithm of mxfp4_gguf may round


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_encodes_alike(x, name):
    fmt, definition = get_format(name), formats.encode(x, name)
    data, scales = ENCODERS[name](x.reshape(fmt.matrix_shape(tuple(x.shape))), fmt)
    if scales is not None:
        differing = (bits(scales) != bits(definition.scales)).nonzero()
        assert not differing.numel(), f"{name}: scale bytes {differing[:5].tolist()}"
    differing = (bits(data) != bits(definition.data)).nonzero()
    assert not differing.numel(), f"{name}: data bytes {differing[:5].tolist()} of {data.numel()}"


def assert_decodes_alike(encoded, dtype=torch.float32):
    ours, definition = DECODERS[encoded.fmt.name](encoded, dtype), formats.decode(encoded, dtype)
    assert ours.shape == definition.shape
    assert ours.dtype == definition.dtype
    assert torch.equal(bits(ours), bits(definition))


def row_length(name):
    return get_format(name).block.cols or 96


# ---- decoding: every code under every kind of scale --------------------------------------------------------------


def every_scale(fmt):
    """Scale words worth trying: all of an 8-bit type, the corners of a wider one."""
    dtype = fmt.scales.dtype
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    if dtype == torch.float32:
        corners = [0.0, -0.0, 1.0, 0.3, 2.0**-126, 2.0**-149, 3.4e38, -0.7, float("inf"), float("nan")]
        return torch.tensor(corners)
    words = [0x0000, 0x0001, 0x03FF, 0x0400, 0x1234, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7E01, 0x7FC0]
    return torch.tensor(words + [word - 0x8000 for word in words], dtype=torch.int16).view(dtype)


IN_BLOCKS = LAYOUTS | VECTOR_LAYOUTS


@pytest.mark.parametrize("name", IN_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bytes_of_ggufs_blocks_decode_alike(name, dtype):
    generator = torch.Generator().manual_seed(0)
    width = 512 // IN_BLOCKS[name].numbers * IN_BLOCKS[name].block_bytes
    raw = torch.randint(0, 256, (260, width), generator=generator, dtype=torch.uint8)
    encoded = Encoded(get_format(name), (260, 512), raw)
    ours, definition = DECODERS[name](encoded, dtype), formats.decode(encoded, dtype)
    assert torch.equal(ours.isnan(), definition.isnan())
    assert torch.equal(bits(ours.nan_to_num(7)), bits(definition.nan_to_num(7)))
    assert explain_decode(encoded).implementation == "numba"


@pytest.mark.parametrize("name", sorted(DECODERS.keys() - IN_BLOCKS.keys()))
def test_every_code_under_every_scale_decodes_alike(name):
    fmt = get_format(name)
    scales = every_scale(fmt)
    width = fmt.data_cols(fmt.block.cols or 256)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(-1, min(width, 256))
    rows = scales.numel() * codes.shape[0]
    data = codes.repeat(scales.numel(), -(-width // codes.shape[1]))[:, :width].contiguous().view(fmt.storage)
    cols = fmt.block.cols or width
    base = torch.tensor(0.37) if fmt.scales.needs_base else None
    encoded = Encoded(fmt, (rows, cols), data, scales.repeat_interleave(codes.shape[0]).reshape(rows, 1), base)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours, definition = DECODERS[name](encoded, dtype), formats.decode(encoded, dtype)
        same = bits(ours) == bits(definition)
        nan = (ours.isnan() & definition.isnan()).reshape(-1).repeat_interleave(dtype.itemsize)
        assert bool((same | nan).all())  # which NaN it is may depend on the place of a number in torch's own loops


@pytest.mark.cross("name", sorted(DECODERS.keys() - IN_BLOCKS.keys()))
@pytest.mark.cross("shape", [(1, 128), (3, 256), (129, 128), (128,), (2, 5, 128), (8, 32, 3, 4), (0, 128)])
@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decodes_every_shape_alike(name, shape, dtype):
    assert_decodes_alike(formats.encode(numbers(*shape), name), dtype)


# ---- encoding: every kind of number --------------------------------------------------------------------------------


def every_bfloat16():
    """All finite bfloat16 numbers, by magnitude, signs in turns."""
    magnitudes = torch.arange(0x7F80, dtype=torch.int32)
    pairs = torch.stack([magnitudes, magnitudes | 0x8000], dim=1).reshape(-1)
    return pairs.to(torch.uint16).view(torch.bfloat16)


@pytest.mark.cross("name", ENCODERS)
@pytest.mark.cross("order", ["by magnitude", "shuffled"])
@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16])
def test_every_bfloat16_number_encodes_alike(name, order, dtype):
    x = every_bfloat16()
    if order == "shuffled":
        x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))]
    cols = row_length(name) if name != "bfloat16" else 64
    x = x[: x.numel() // cols * cols].reshape(-1, cols).to(dtype)
    if get_format(name).scales is not None and get_format(name).scales.dtype == torch.float16:
        x = x[x.abs().amax(dim=1) < 5e5]  # beyond, float16 scales overflow: an error, tested below
    assert_encodes_alike(x.contiguous(), name)


def near_ties(limit, top):
    """Rows whose largest number is `top` and whose others lie on, just below and just above ties of codes."""
    ties = torch.arange(1, 4 * int(limit) + 4) / 4 * (top / limit)
    around = torch.stack([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(torch.inf))])
    return torch.cat([around.reshape(-1), -around.reshape(-1)])


@pytest.mark.cross("name", ENCODERS)
@pytest.mark.cross("power", [-130, -126, -100, -20, 0, 8])
def test_ties_and_their_neighbours_encode_alike(name, power):
    cols = row_length(name)
    rows = []
    for limit, stretch in itertools.product((6.0, 7.0, 8.0, 127.0, 448.0), (1.0, 1.3, 1.75, 1.999)):
        top = limit * stretch * 2.0**power
        values = near_ties(limit, top)
        values = values[values.abs() <= top]
        rows += [torch.cat([torch.tensor([sign * top]), part]) for part in values.split(cols - 1) for sign in (1, -1)]
    x = torch.zeros(len(rows), cols)
    for place, row in enumerate(rows):
        x[place, : row.numel()] = row
    assert_encodes_alike(x, name)
    assert_encodes_alike(x.flip(1).contiguous(), name)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_magnitude_encodes_alike(name):
    highest = 15 if "gguf" in name and name != "mxfp4_gguf" else 125
    x = torch.stack([numbers(row_length(name), seed=power) * 2.0**power for power in range(-149, highest)])
    assert_encodes_alike(x, name)


@pytest.mark.parametrize("name", SCALED)
def test_zeros_signs_and_flushed_scales_encode_alike(name):
    cols = row_length(name)
    x = torch.zeros(12, cols)
    x[1] = -0.0
    x[2, ::2] = -0.0
    x[3, 1::2] = -0.0
    x[4, 5] = 2.0**-149  # the scale is flushed to zero
    x[5] = -(2.0**-149)
    x[6] = numbers(cols) * 2.0**-140
    x[7, 0] = 2.0**-126
    x[8, 3], x[8, 9] = 2.0, -2.0  # the extreme with both signs: the first decides
    x[9, 3], x[9, 9] = -2.0, 2.0
    x[10] = 1.0
    x[11] = torch.tensor([1.0, -1.0]).repeat(cols // 2)
    assert_encodes_alike(x, name)
    for limit in (6, 7, 8, 127, 448):  # scales at the edge of being flushed
        edge = torch.tensor(limit * 2.0**-126)
        for top in (edge, edge.nextafter(torch.tensor(0.0)), edge.nextafter(torch.tensor(1.0))):
            assert_encodes_alike((numbers(1, cols).clamp(-1, 1) * top).index_fill(1, torch.tensor([0]), top), name)


@pytest.mark.parametrize("name", SCALED)
def test_powers_of_two_from_below_encode_alike(name):
    """Where mxfp4_gguf's logarithm rounds to the next binade, and E8M0 exponents change."""
    highest = 0x4880 if "0_gguf" in name else 0x7F00 if name == "mxfp4_gguf" else 0x7F80  # beyond, GGUF overflows
    ends = torch.arange(0x0080, highest + 1, 0x0080, dtype=torch.int32) << 16
    tops = (ends.unsqueeze(1) - torch.arange(1, MANTISSA_END + 2, dtype=torch.int32)).reshape(-1).view(torch.float32)
    x = numbers(tops.numel(), row_length(name)).clamp(-1, 1) * tops.unsqueeze(1)
    x[:, 7] = tops
    assert_encodes_alike(x, name)


@pytest.mark.cross("name", ENCODERS)
@pytest.mark.cross("shape", [(1, 128), (3, 256), (129, 128), (128,), (2, 5, 128), (8, 32, 3, 4), (0, 128)])
@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_encodes_every_shape_alike(name, shape, dtype):
    assert_encodes_alike(numbers(*shape).to(dtype), name)


@pytest.mark.parametrize("name", ["int8_row", "fp8_e4m3_row", "bfloat16"])
@pytest.mark.parametrize("cols", [0, 1, 2, 15, 33, 1001])
def test_rows_of_any_length_encode_and_decode_alike(name, cols):
    x = numbers(7, cols)
    assert_encodes_alike(x, name)
    if name in DECODERS:
        assert_decodes_alike(formats.encode(x, name))


# ---- threads, long rows, errors --------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut even small tensors, and share rows of 200 between threads."""
    monkeypatch.setattr(cpu_codec, "SMALLEST_PIECE", 256)
    monkeypatch.setattr(cpu_codec, "RUN", 128)
    monkeypatch.setattr(cpu_codec, "LONG_ROW", 200)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.cross("name", sorted(ENCODERS.keys() | (DECODERS.keys() - IN_BLOCKS.keys())))
@pytest.mark.cross("threads", [1, 2, 5])
@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_pieces")
def test_the_number_of_threads_changes_nothing(name, threads, dtype):
    torch.set_num_threads(threads)
    x = numbers(37, 384).to(dtype)
    if name in ENCODERS:
        assert_encodes_alike(x, name)
    if name in DECODERS:
        assert_decodes_alike(formats.encode(x, name), dtype)


@pytest.mark.usefixtures("small_pieces")
def test_several_threads_may_encode_at_once():
    torch.set_num_threads(2)
    tensors = [numbers(37, 384, seed=seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(assert_encodes_alike, tensors, itertools.repeat("mxfp4")))


FORKING = """
import os, torch
from bitplan.formats import get_format
from bitplan.formats import cpu_codec
cpu_codec.SMALLEST_PIECE = 256
torch.set_num_threads(2)
encode = lambda: cpu_codec.ENCODERS["int8_row"](torch.ones(64, 96), get_format("int8_row"))
encode()
child = os.fork()
if child == 0:
    encode()
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_encodes_too(tmp_path):
    assert Program(FORKING, folder=tmp_path).wait() == 7


@pytest.mark.usefixtures("small_pieces")
def test_an_error_in_a_thread_is_raised():
    torch.set_num_threads(3)
    x = numbers(64, 128)
    x[50, 3] = torch.nan
    with pytest.raises(NonFiniteError):
        ENCODERS["mxfp4"](x, get_format("mxfp4"))


@pytest.mark.cross("name", SCALED)
@pytest.mark.cross("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.cross("place", [(0, 0), (6, 95)])
def test_a_number_that_is_not_finite_is_refused(name, bad, place):
    x = numbers(7, 128)
    x[place] = bad
    with pytest.raises(NonFiniteError):
        ENCODERS[name](x, get_format(name))


@pytest.mark.parametrize(("name", "largest"), [("q4_0_gguf", 524160.0), ("q8_0_gguf", 65520.0 * 127)])
def test_a_scale_beyond_float16_is_refused(name, largest):
    x = numbers(3, 128)
    x[1, 5] = torch.tensor(largest).nextafter(torch.tensor(0.0))
    assert_encodes_alike(x, name)
    x[1, 5] = largest
    with pytest.raises(NonFiniteError):
        ENCODERS[name](x, get_format(name))


@pytest.mark.parametrize("name", [name for name in SCALED if get_format(name).scales.dtype != torch.float16])
def test_the_largest_numbers_encode_alike_or_are_refused(name):
    """The last hundred of float32: there limit / 127 * 127 rounds to infinity, and so does ggml's logarithm."""
    words = torch.arange(0x7F800000 - 100, 0x7F800000, dtype=torch.int32)
    x = numbers(100, 128)
    x[:, 17] = words.view(torch.float32)
    taken = []
    for row in x.split(1):
        try:
            formats.encode(row, name)
        except FormatError:
            with pytest.raises(NonFiniteError):
                ENCODERS[name](row, get_format(name))
        else:
            taken.append(row)
    if taken:
        assert_encodes_alike(torch.cat(taken), name)
        assert_encodes_alike(-torch.cat(taken), name)


def test_nan_in_a_bfloat16_cast_is_torchs():
    x = numbers(5, 100)
    x[2, 3], x[4, 99], x[0, 0] = torch.nan, torch.inf, -torch.inf
    assert_encodes_alike(x, "bfloat16")
