"""GGUF's blocks with their own scales: bytes as gguf-py reads them, scales by search, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from bitplan.base.errors import FormatError, NonFiniteError
from bitplan.formats import Encoded, error_report, get_format, requantize, scale_health
from bitplan.formats.codec import decode, encode
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS
from bitplan.formats.gguf.layouts import LAYOUTS
from bitplan.formats.gguf.search import starts
from tests.crosses import few
from tests.formats.samples import gaussian, heavy_tailed, same

EVERY = LAYOUTS | VECTOR_LAYOUTS
NAMES = list(EVERY)


def blocks_format(name: str) -> GgufBlocks:
    fmt = get_format(name)
    assert isinstance(fmt, GgufBlocks)
    return fmt


def by_gguf_py(encoded: Encoded) -> Tensor:
    kind = GGMLQuantizationType[EVERY[encoded.fmt.name].ggml_type]
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(encoded.data.numpy(), kind))


def lost(x: Tensor, encoded: Encoded, weights: Tensor | float = 1.0) -> float:
    return float(((decode(encoded) - x).double().square() * weights).sum())


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_decode_as_gguf_py_decodes_them(name):
    layout = EVERY[name]
    raw = torch.randint(
        0, 256, (200, layout.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    encoded = Encoded.from_bytes(name, (200, layout.numbers), raw.numpy().tobytes())
    ours, theirs = decode(encoded), by_gguf_py(encoded)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert same(ours.nan_to_num(nan=1.0), theirs.nan_to_num(nan=1.0))
    assert torch.equal(layout.pack(layout.unpack(raw)), raw)
    assert encoded.to_bytes() == raw.numpy().tobytes()


# Squared error over the sum of squares of these very numbers, as ggml_quantize_chunk of ggml 0.25.3 leaves it; of IQ
# formats with an importance of one everywhere, as xllamacpp 2026.10 does.
THEIRS = {
    "q4_1_gguf": 0.006207,
    "q5_0_gguf": 0.001828,
    "q5_1_gguf": 0.001437,
    "iq4_nl_gguf": 0.005814,
    "q2_k_gguf": 0.088,
    "q3_k_gguf": 0.02252,
    "q4_k_gguf": 0.005178,
    "q5_k_gguf": 0.001301,
    "q6_k_gguf": 0.000315,
    "iq4_xs_gguf": 0.0057340,
    "iq3_s_gguf": 0.018707,
    "iq3_xxs_gguf": 0.032722,
    "iq2_s_gguf": 0.061798,
    "iq2_xs_gguf": 0.089918,
    "iq2_xxs_gguf": 0.117363,
}


@pytest.mark.parametrize("name", [*few(LAYOUTS, 5), *VECTOR_LAYOUTS])
def test_encoding_is_as_near_as_llama_cpp_is(name):
    x = gaussian(32, 512)
    encoded = encode(x, name)
    assert same(decode(encoded), by_gguf_py(encoded))
    assert lost(x, encoded) / float(x.double().square().sum()) < THEIRS[name]
    assert encoded.nbytes == get_format(name).nbytes((32, 512))


@pytest.mark.parametrize("name", [*few(LAYOUTS, 4), *few(VECTOR_LAYOUTS, 2)])
def test_importance_moves_the_error_to_where_it_matters_less(name):
    x, importance = heavy_tailed(8, 512), gaussian(512, seed=3).exp()
    plain, weighted = encode(x, name), encode(x, name, importance=importance)
    assert lost(x, weighted, importance) < lost(x, plain, importance)
    assert lost(x, plain) <= lost(x, weighted)
    assert same(encode(x, name, importance=torch.full((512,), 7.0)).data, plain.data)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("number", few([0.0, 1e-30, 2.0**-20, 0.37, -0.37, 3e4], 3))
def test_equal_numbers_stay_near_themselves(name, number):
    x = torch.full((1, 256), number)
    error = (decode(encode(x, name)) - x).abs().max()
    assert error <= 0.035 * abs(number) or error < 2.0**-24 * 127


@pytest.mark.parametrize("name", ["q4_1_gguf", "q4_k_gguf", "q6_k_gguf"])
def test_other_types_shapes_and_padding(name):
    x = gaussian(3, 2, 256, dtype=torch.bfloat16)
    assert same(encode(x, name).data, encode(x.float(), name).data)
    assert encode(x, name).data.shape == (3, 2, blocks_format(name).data_cols(256))
    ragged = gaussian(3, 300)
    filled = encode(ragged, name, pad="zero", importance=torch.ones(300))
    assert decode(filled).shape == (3, 300)
    assert error_report(ragged, filled).cosine > 0.99
    assert decode(encode(torch.empty(0, 256), name)).shape == (0, 256)


def test_what_cannot_be_held_is_refused():
    with pytest.raises(FormatError, match=r"q4_k_gguf has blocks of 256 .* q5_0_gguf, which holds rows of 288"):
        encode(gaussian(2, 288), "q4_k_gguf")
    with pytest.raises(FormatError, match="stores its scales in float16"):
        encode(torch.full((1, 256), 1e6), "q6_k_gguf")
    with pytest.raises(NonFiniteError, match="1 NaN"):
        encode(torch.cat([torch.tensor([[torch.nan]]), torch.zeros(1, 255)], dim=1), "q2_k_gguf")
    with pytest.raises(FormatError, match="takes no `scale`"):
        encode(gaussian(2, 256), "q3_k_gguf", scale=0.1)
    with pytest.raises(FormatError, match="no scale rule 'absmax'"):
        encode(gaussian(2, 256), "q3_k_gguf", scale_rule="absmax")
    with pytest.raises(FormatError, match="codes and scales share its blocks"):
        encode(gaussian(2, 256), "q3_k_gguf").codes()


def test_requantizing_searches_again_and_counts_the_blocks_that_changed():
    x = gaussian(4, 512)
    encoded = encode(x, "q4_k_gguf")
    again, counts = requantize(encoded, x)
    assert same(again.data, encoded.data)
    assert (counts.tiles, counts.rebased) == (8, 0)
    x[0, 0] += 1.0
    assert requantize(encoded, x)[1].rebased == 1


def test_where_the_search_for_scales_starts():
    """The bytes of every file depend on these."""
    widths = {name: sorted(round(start.width, 3) for start in starts(one)) for name, one in LAYOUTS.items()}
    found = {name: (len(each), each[0], each[-1]) for name, each in widths.items()}
    assert found == {
        "q4_1_gguf": (13, 0.8, 1.0),
        "q5_0_gguf": (14, 0.78, 1.04),
        "q5_1_gguf": (13, 0.85, 1.0),
        "iq4_nl_gguf": (18, -1.18, 1.05),
        "q2_k_gguf": (13, 0.6, 1.0),
        "q3_k_gguf": (18, -1.467, 1.1),
        "q4_k_gguf": (13, 0.8, 1.0),
        "q5_k_gguf": (13, 0.85, 1.0),
        "q6_k_gguf": (9, 0.92, 1.04),
        "iq4_xs_gguf": (18, -1.18, 1.05),
    }


def test_a_damaged_scale_is_counted():
    encoded = encode(gaussian(2, 512), "q6_k_gguf")
    encoded.data[0, 208:210] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # a NaN
    health = scale_health(encoded)
    assert (health.blocks, health.nan_scales, health.saturated_scales) == (4, 1, 0)
