"""Products with packed weights on a CPU: pieces against float64, and torch's 4-bit kernel within its bound."""

from __future__ import annotations

import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from bitplan.packed.products import cpu_matmul
from bitplan.packed.products.cpu_matmul import (
    FOUR_BIT_FORMAT,
    four_bit_bound,
    four_bit_linear,
    pack_four_bit,
    piece_bytes,
    piece_rows,
    why_not_four_bit,
)
from bitplan.packed.products.decode_row_slices import (
    cut,
    decoded_pieces,
    gradient_over_pieces,
    linear_over_pieces,
    rows_of,
    why_no_rows,
)

FORMATS = ("mxfp4", "fp4_u8_g128", "nvfp4", "int8_row", "int8_g128", "int4_g32", "q4_0_gguf", "fp8_e4m3_row")
UNIT = 2.0**-24  # float32's unit roundoff


def packed(name: str, rows: int, cols: int, seed: int = 0) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    return encode(torch.randn(rows, cols, generator=generator), name, pad="zero")


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "step", "expected"),
    [
        (0, 4, []),
        (4, 4, [(0, 4)]),
        (5, 4, [(0, 2), (2, 5)]),  # no sliver of one row
        (8, 4, [(0, 4), (4, 8)]),
        (3, 0, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_cut_covers_all_rows_in_equal_pieces(rows: int, step: int, expected: list[tuple[int, int]]) -> None:
    assert [(piece.start, piece.stop) for piece in cut(rows, step)] == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cols", [256, 100])
def test_rows_of_an_encoding_decode_to_rows_of_its_numbers(name: str, cols: int) -> None:
    weight = packed(name, 9, cols)
    assert torch.equal(decode(rows_of(weight, slice(2, 7))), decode(weight)[2:7])


@pytest.mark.parametrize("name", ["fp8_e4m3_b128", "int8", "uint8", "ternary", "bfloat16"])
def test_formats_whose_blocks_span_rows_are_refused(name: str) -> None:
    assert why_no_rows(get_format(name)) is not None
    with pytest.raises(FormatError, match=name):
        rows_of(encode(torch.randn(4, 256), name), slice(0, 2))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cols", [256, 100])
def test_pieces_give_the_product_within_the_stated_bound(name: str, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "piece_bytes", lambda: 7 * 4 * cols)  # seven rows
    weight, x, bias = packed(name, 40, cols), normal(5, cols), normal(40, seed=2)
    assert piece_rows(cols, torch.float32) == 7
    w = decode(weight).double()
    result = linear_over_pieces(x, decoded_pieces(weight, x.dtype, 7), 40, bias)
    bound = (cols + 1) * UNIT * (x.double().abs() @ w.abs().T + bias.double().abs())
    assert result.dtype == torch.float32
    assert bool(((result - (x.double() @ w.T + bias.double())).abs() <= bound).all())

    grad = normal(5, 40, seed=3)
    result = gradient_over_pieces(grad, decoded_pieces(weight, grad.dtype, 7), cols)
    bound = 41 * UNIT * (grad.double().abs() @ w.abs())
    assert bool(((result - grad.double() @ w).abs() <= bound).all())


def test_pieces_never_expand_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "piece_bytes", lambda: 4 * 4 * 64)
    sizes = [
        tuple(w.shape) for _, w in decoded_pieces(packed("mxfp4", 10, 64), torch.float32, piece_rows(64, torch.float32))
    ]
    assert sizes == [(3, 64), (3, 64), (4, 64)]


def test_a_band_follows_the_cache_and_stays_within_limits() -> None:
    assert 2 * 2**20 <= piece_bytes() <= 16 * 2**20
    assert piece_rows(2**30, torch.float32) == 1
    assert piece_rows(0, torch.float32) > 0


def test_products_over_no_pieces_are_empty_or_zero() -> None:
    assert linear_over_pieces(torch.ones(3, 4), iter([]), 0).shape == (3, 0)
    assert torch.equal(gradient_over_pieces(torch.ones(3, 0), iter([]), 4), torch.zeros(3, 4))


def test_sixteen_bit_gradients_are_summed_in_float32() -> None:
    pieces = [(slice(row, row + 1), torch.full((1, 1), 1.0, dtype=torch.bfloat16)) for row in range(1000)]
    grad = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert float(gradient_over_pieces(grad, iter(pieces), 1)) == 1000.0  # bfloat16 sums of ones stop at 256


# ---- torch's 4-bit kernel --------------------------------------------------------------------------------------------

needs_kernel = pytest.mark.skipif(cpu_matmul._why_not_here() is not None, reason=str(cpu_matmul._why_not_here()))


@needs_kernel
@pytest.mark.parametrize(("rows", "cols"), [(130, 288), (64, 64), (5, 100), (1, 4096)])
@pytest.mark.parametrize("batch", [1, 9])
def test_four_bit_kernel_stays_within_its_bound(rows: int, cols: int, batch: int) -> None:
    weight, x, bias = packed(FOUR_BIT_FORMAT, rows, cols), normal(batch, cols), normal(rows, seed=2)
    w = decode(weight)
    result = four_bit_linear(x, weight, pack_four_bit(weight), bias)
    off = (result - (x.double() @ w.double().T + bias.double())).abs()
    sums = (cols + 1) * UNIT * (x.abs() @ w.abs().T + bias.abs())
    assert bool((off <= four_bit_bound(x, w) + sums).all())
    assert off.norm() / result.norm() < 0.02


@needs_kernel
def test_four_bit_kernel_changes_no_weight() -> None:
    """Inputs 0..255 that span their range are integers to the kernel, so what is left is float32's rounding."""
    weight = packed(FOUR_BIT_FORMAT, 33, 96)
    x = torch.randint(0, 256, (4, 96), generator=torch.Generator().manual_seed(0)).float()
    x[:, 0], x[:, 1] = 0.0, 255.0
    exact = x.double() @ decode(weight).double().T
    off = (four_bit_linear(x, weight, pack_four_bit(weight)) - exact).abs()
    bound = 97 * UNIT * (x.abs() @ decode(weight).abs().T)
    assert bool((off <= bound).all())  # a scale rounded from float16 to bfloat16 would be off by 2^-9, not 2^-17


@needs_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nan_and_no_other_row_does(bad: float) -> None:
    weight, x = packed("int4_g32", 8, 64), normal(3, 64)
    x[1, 5] = bad
    result = four_bit_linear(x, weight, pack_four_bit(weight))
    assert result.isnan().any(dim=1).tolist() == [False, True, False]


@needs_kernel
def test_four_bit_kernel_takes_an_empty_batch() -> None:
    weight = packed("int4_g32", 8, 64)
    assert four_bit_linear(torch.empty(0, 64), weight, pack_four_bit(weight)).shape == (0, 8)


@needs_kernel
def test_the_copy_is_about_as_large_as_the_weight() -> None:
    weight = packed(FOUR_BIT_FORMAT, 256, 512)
    assert 1.0 <= pack_four_bit(weight).nbytes / weight.nbytes < 1.1


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("mxfp4", (8, 64), torch.float32, "not mxfp4"),
        ("int4_g32", (8, 64), torch.float64, "float64"),
        ("int4_g32", (8, 32), torch.float32, "more than 32"),
    ],
)
def test_why_not_four_bit_says_what_is_wrong(name: str, shape: tuple[int, int], dtype: torch.dtype, said: str) -> None:
    assert said in str(why_not_four_bit(packed(name, *shape), dtype))


def broken(x: torch.Tensor, _: torch.Tensor, rows: int, __: int) -> torch.Tensor:
    return torch.ones(x.shape[0], rows)


def missing(*_: object) -> torch.Tensor:
    raise RuntimeError("no kernel for this processor\nmore")


@pytest.mark.parametrize(("kernel", "said"), [(broken, "wrong results"), (missing, "no kernel for this processor")])
def test_a_kernel_that_fails_its_probe_is_not_used(kernel: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "_pack", lambda *_: torch.zeros(4, dtype=torch.uint8))
    monkeypatch.setattr(cpu_matmul, "_multiply", kernel)
    assert said in str(cpu_matmul._why_not_here.__wrapped__())
