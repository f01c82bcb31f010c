"""How scales are stored: every byte of E8M0, E4M3 and uint8 both ways, and where a scale becomes zero."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bitplan.formats.elements import dtype_name
from bitplan.formats.gguf.blocks import GgufPowerOfTwoScales
from bitplan.formats.scale_rules import BasedScales, PowerOfTwoScales, ScaleStorage, flush_small, reciprocal
from tests.formats.samples import every_byte, same

E8M0 = PowerOfTwoScales()
E4M3_SCALES = BasedScales("float8_e4m3fn", 448.0)
LINEAR_SCALES = BasedScales("uint8", 255.0)


def test_every_e8m0_byte_loads_as_in_ml_dtypes():
    expected = every_byte().numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    loaded = E8M0.load(every_byte(), None)
    assert loaded.dtype == torch.float32
    assert np.array_equal(loaded.numpy(), expected, equal_nan=True)
    assert float(loaded[0]) == 2.0**-127
    assert float(loaded[254]) == 2.0**127
    assert bool(loaded[255].isnan())


def test_every_e8m0_byte_but_nan_is_stored_as_in_ml_dtypes():
    powers = E8M0.load(every_byte()[:255], None)
    assert torch.equal(E8M0.store(powers, None), every_byte()[:255])
    assert np.array_equal(powers.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8), every_byte().numpy()[:255])


@pytest.mark.parametrize(("scale", "byte"), [(0.0, 0), (2.0**-149, 0), (2.0**-127, 0), (2.0**-126, 1), (2.0**127, 254)])
def test_e8m0_ends(scale, byte):
    assert int(E8M0.store(torch.tensor([scale]), None)) == byte


def test_ggml_gives_byte_255_a_power_of_its_own():
    loaded = GgufPowerOfTwoScales().load(every_byte(), None)
    assert loaded.tolist() == [2.0 ** (byte - 127) for byte in range(256)]


@pytest.mark.parametrize("base", [1.0, 0.37, 2.0**-100])
def test_every_e4m3_scale_byte(base):
    loaded = E4M3_SCALES.load(every_byte().view(torch.float8_e4m3fn), torch.tensor(base))
    expected = every_byte().numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(base)
    assert np.array_equal(loaded.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("base", [1.0, 0.37, 2.0**-100])
def test_every_linear_scale_byte(base):
    loaded = LINEAR_SCALES.load(every_byte(), torch.tensor(base))
    assert loaded.tolist() == (np.arange(256, dtype=np.float32) * np.float32(base)).tolist()


@pytest.mark.parametrize(
    ("storage", "scale", "base", "stored"),
    [
        (LINEAR_SCALES, 255.0, 1.0, 255.0),
        (LINEAR_SCALES, 300.0, 1.0, 255.0),  # beyond the largest: saturates
        (LINEAR_SCALES, 2.5, 1.0, 2.0),
        (LINEAR_SCALES, 0.01, 1.0, 1.0),  # a block that is not zero keeps a scale that is not zero
        (LINEAR_SCALES, 0.0, 1.0, 0.0),
        (LINEAR_SCALES, 0.0, 0.0, 0.0),
        (E4M3_SCALES, 448.0, 1.0, 448.0),
        (E4M3_SCALES, 900.0, 1.0, 448.0),
        (E4M3_SCALES, 17.0, 1.0, 16.0),
        (E4M3_SCALES, 2.0**-11, 1.0, 0.0),
        (E4M3_SCALES, 0.0, 0.0, 0.0),
        (E4M3_SCALES, 0.5, 0.25, 0.5),
    ],
)
def test_based_scales_round_and_saturate(storage, scale, base, stored):
    factor = torch.tensor(base)
    assert storage.load(storage.store(torch.tensor([scale]), factor), factor).tolist() == [stored]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float_scales_are_casts(dtype):
    scale = torch.tensor([1.0, 1 / 3, 7e-5])
    assert same(ScaleStorage(dtype_name(dtype)).store(scale, None), scale.to(dtype))
    assert same(ScaleStorage(dtype_name(dtype)).load(scale.to(dtype), None), scale.to(dtype).float())


@pytest.mark.parametrize(
    ("dtype", "scale", "stored"),
    [
        (torch.float32, 2.0**-126, 2.0**-126),
        (torch.float32, -(2.0**-126), -(2.0**-126)),
        (torch.float32, 2.0**-127, 0.0),
        (torch.float64, 2.0**-127, 2.0**-127),
        (torch.float64, 2.0**-1022, 2.0**-1022),
        (torch.float64, 2.0**-1023, 0.0),
    ],
)
def test_a_scale_whose_reciprocal_could_overflow_becomes_zero(dtype, scale, stored):
    flushed = flush_small(torch.tensor([scale], dtype=dtype))
    assert flushed.tolist() == [stored]
    assert bool(reciprocal(flushed).isfinite())


def test_reciprocal_of_zero_is_zero():
    assert reciprocal(torch.tensor([0.0, -0.0, 4.0])).tolist() == [0.0, 0.0, 0.25]
