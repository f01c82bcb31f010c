"""Blocks of vectors (IQ2, IQ3): the nearest vector is the nearest, scales are good, and what is stored is legal."""

from __future__ import annotations

import itertools

import pytest
import torch

from bitplan.formats import Encoded, get_format, scale_health
from bitplan.formats.codec import decode, encode
from bitplan.formats.gguf.cpu_vector_search import CompiledVectors
from bitplan.formats.gguf.grids import (
    VECTOR_LAYOUTS,
    TorchVectors,
    codebook,
    search_vectors,
    signs_of,
)
from tests.formats.samples import gaussian, heavy_tailed, same


@pytest.mark.parametrize("search", [TorchVectors(), CompiledVectors()], ids=["torch", "numba"])
@pytest.mark.parametrize("name", VECTOR_LAYOUTS)
def test_no_vector_with_any_legal_signs_is_nearer(name, search):
    layout = VECTOR_LAYOUTS[name]
    x, w = gaussian(6, layout.group, seed=2), gaussian(3, layout.group, seed=3).exp()
    x[0, :8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.1, 0.2, 0.3, 0.4])
    numbers = codebook(layout.ggml_type).numbers
    scale = x.abs().amax(1) / numbers.max() * 0.9
    found = search.nearest(x, w, scale, layout)
    values = (numbers[found.vectors.long()].flatten(1) * signs_of(found.signs)).double()
    weights, steps = w.repeat(2, 1).double(), scale.double()[:, None]
    ours = (weights * (values * steps - x) ** 2).reshape(-1, 8).sum(1)
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=8)))
    if layout.even:
        assert bool((values.reshape(-1, 8) < 0).sum(1).fmod(2).eq(0).all())
        signs = signs[signs.prod(1) > 0]
    least = torch.full_like(ours, torch.inf)
    eights = (part.reshape(-1, 8) for part in (x.double(), weights, steps.expand(x.shape)))
    for at, (own, weight, step) in enumerate(zip(*eights, strict=True)):
        # The cost of each vector with each of its signs, one or two vectors in a byte of signs.
        cost = torch.zeros(len(signs), dtype=torch.float64)
        for first in range(0, 8, layout.width):
            part = slice(first, first + layout.width)
            tried = numbers.double()[:, None] * signs[None, :, part].double() * step[part]
            cost += (weight[part] * (tried - own[part]) ** 2).sum(2).amin(0)
        least[at] = cost.min()
    assert torch.all(ours <= least * (1 + 1e-5))


@pytest.mark.parametrize("name", VECTOR_LAYOUTS)
def test_scales_lose_at_most_a_twentieth_more_than_the_best_of_many(name):
    layout, x = VECTOR_LAYOUTS[name], torch.cat([gaussian(4, 256), heavy_tailed(4, 256)])
    weights = gaussian(256, seed=5).exp().reshape(-1, layout.group)
    error = (decode(encode(x, name, importance=weights.flatten())) - x).square() * weights.flatten()
    groups = x.reshape(-1, layout.group)
    least, search = torch.full((len(groups),), torch.inf), CompiledVectors()
    extreme = groups.abs().amax(1) / codebook(layout.ggml_type).levels[-1]
    for step in range(30):  # each group with a scale of its own, not a multiple of d
        scale = extreme * (0.5 + 0.03 * step)
        found = search.nearest(groups, weights, scale, layout)
        fitted = found.xv / found.vv
        lost = (groups.square() * weights.repeat(len(groups) // len(weights), 1)).sum(1) - fitted * found.xv
        least = torch.minimum(least, lost)
    assert float(error.sum()) < 1.05 * float(least.sum())


@pytest.mark.parametrize("name", VECTOR_LAYOUTS)
def test_what_is_found_is_what_is_stored(name):
    layout, x = VECTOR_LAYOUTS[name], heavy_tailed(3, 512)
    x[2] = 0.0
    parts = search_vectors(x, torch.ones(1, layout.group), layout, CompiledVectors())
    again = layout.unpack(layout.pack(parts))
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))
    assert torch.equal(decode(encode(x, name))[2], torch.zeros(512))


def test_a_block_of_which_one_group_is_zero_keeps_the_others():
    x = gaussian(1, 256)
    x[0, :32] = 0.0
    values = decode(encode(x, "iq3_s_gguf"))
    assert float(values[0, :32].abs().max()) <= float(x.abs().max()) / 31
    assert float((values - x)[0, 32:].square().mean()) < 0.02


def test_large_and_small_numbers_stay_finite():
    for factor in (3e3, 1e-6):
        for name in VECTOR_LAYOUTS:
            x = gaussian(2, 256) * factor
            assert bool(decode(encode(x, name)).isfinite().all())


def test_a_damaged_scale_is_counted():
    encoded = encode(gaussian(2, 512), "iq2_s_gguf")
    encoded.data[0, 82:84] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # a NaN
    health = scale_health(encoded)
    assert (health.blocks, health.nan_scales) == (4, 1)


def test_blocks_go_to_bytes_and_back():
    fmt = get_format("iq2_xxs_gguf")
    encoded = encode(gaussian(3, 512), fmt)
    assert encoded.nbytes == 3 * 2 * 66 == len(encoded.to_bytes())
    assert same(Encoded.from_bytes(fmt, (3, 512), encoded.to_bytes()).data, encoded.data)
