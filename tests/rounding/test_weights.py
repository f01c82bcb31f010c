"""Better numbers in the same bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats import get_format
from bitplan.formats.codec import decode, encode
from bitplan.rounding import round_columns
from bitplan.rounding.layout import layout_of, with_rows_of
from bitplan.rounding.weights import round_weight, round_with_report
from tests.compiled_loops import compiled_loops as compiled_loops
from tests.crosses import few

FORMATS = (
    "int4_g32",
    "q4_0_gguf",
    "q8_0_gguf",
    "mxfp4",
    "mxfp4_gguf",
    "nvfp4",
    "fp4_u8_g128",
    "int8_g128",
    "fp8_e4m3_row",
    "fp8_e4m3_b128",
    "mxfp8_e4m3",
    "q4_0_poly",
    "int4",
    "int2",
    "ternary",
    "int8_row",
    "q3_k_gguf",
    "q4_k_gguf",
    "q6_k_gguf",
    "q5_1_gguf",
)
VECTORS = ("iq3_s_gguf", "iq3_xxs_gguf", "iq2_s_gguf", "iq2_xs_gguf", "iq2_xxs_gguf")
ROWS, COLS = 24, 128


@functools.cache
def example(cols: int = COLS) -> tuple[Tensor, Tensor]:
    """A weight, and inputs that are correlated and of different sizes, one of them never seen."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, cols, generator=generator)
    mixing = torch.randn(cols, cols, generator=generator) / cols**0.5 + 0.5 * torch.eye(cols)
    inputs = torch.randn(512, cols, generator=generator) @ mixing * torch.rand(cols, generator=generator).add(0.1)
    inputs[:, 7] = 0
    return weight, inputs


WEIGHT, INPUTS = example()
HESSIAN, MOMENTS = INPUTS.T @ INPUTS, INPUTS.square().mean(0)


@pytest.mark.parametrize("fmt", [*few(FORMATS[:-5], 4), *few(FORMATS[-5:], 3)])
def test_statistics_make_the_error_they_are_of_smaller(fmt: str) -> None:
    is_wide = "_k_" in fmt or fmt in ("int8_row", "int4")  # these two have blocks wider than a batch of columns, too
    weight, inputs = example(256 if is_wide else COLS)
    moments = inputs.square().mean(0)

    def output_error(values: Tensor) -> float:
        return float(((values - weight) @ inputs.T).double().square().sum())

    def weighted_error(values: Tensor) -> float:
        return float(((values - weight).double().square() * moments).sum())

    plain = encode(weight, fmt)
    by_moments = round_weight(weight, fmt, moments=moments)
    compensated, report = round_with_report(weight, fmt, hessian=inputs.T @ inputs)
    for rounded in (by_moments, compensated):
        assert {part: (t.dtype, t.shape) for part, t in rounded.parts.items()} == {
            part: (t.dtype, t.shape) for part, t in plain.parts.items()
        }
    assert weighted_error(decode(by_moments)) <= weighted_error(decode(plain))
    errors = [output_error(decode(each)) for each in (plain, by_moments, compensated)]
    assert errors[2] < 0.85 * errors[0]
    assert errors[2] < errors[1]
    assert report.after < report.before


def test_the_same_call_gives_the_same_bytes() -> None:
    first, second = (round_weight(WEIGHT, "nvfp4", hessian=HESSIAN).to_bytes() for _ in range(2))
    assert first == second


def test_without_statistics_the_weights_own_error_is_smaller() -> None:
    plain, searched = (decode(each) - WEIGHT for each in (encode(WEIGHT, "mxfp4"), round_weight(WEIGHT, "mxfp4")))
    assert float(searched.square().sum()) < float(plain.square().sum())


def test_rows_that_encode_rounds_better_are_as_encode_has_them() -> None:
    """A row that lies on the grid has no error, and compensation cannot make it less."""
    weight, inputs = example(256)
    weight = weight.clone()
    weight[3] = decode(encode(weight, "q4_0_gguf"))[3]
    rounded, report = round_with_report(weight, "q4_0_gguf", hessian=inputs.T @ inputs)
    assert torch.equal(decode(rounded)[3], weight[3])
    assert report.plain <= 1


@pytest.mark.parametrize("fmt", ["int4_g32", "q5_1_gguf"])  # scales apart from the codes, and among them
def test_rows_of_two_results_are_mixed(fmt: str) -> None:
    ours, theirs = encode(WEIGHT, fmt), encode(-2 * WEIGHT, fmt)
    strips = torch.arange(ROWS) % 3 == 1
    mixed = with_rows_of(ours, theirs, layout_of(ours.fmt, ours.shape), strips)
    assert torch.equal(decode(mixed), torch.where(strips.unsqueeze(1), decode(theirs), decode(ours)))


def test_rows_that_share_their_scale_are_taken_together() -> None:
    ours, theirs = encode(WEIGHT, "int4"), encode(-2 * WEIGHT, "int4")
    for taken, expected in ((True, theirs), (False, ours)):
        assert with_rows_of(ours, theirs, layout_of(ours.fmt, ours.shape), torch.tensor([taken])) is expected


def test_a_last_block_that_is_not_whole_is_filled() -> None:
    weight, hessian = WEIGHT[:, :100], HESSIAN[:100, :100]
    with pytest.raises(FormatError, match="not a multiple"):
        round_weight(weight, "int4_g32", hessian=hessian)
    rounded = round_weight(weight, "int4_g32", hessian=hessian, pad="zero")
    assert rounded.nbytes == encode(weight, "int4_g32", pad="zero").nbytes
    assert round_weight(weight, "fp8_e4m3_b128", hessian=hessian).shape == (ROWS, 100)


def test_scales_and_minima_of_groups_follow_the_codes() -> None:
    """Sweeps move them, too: in the least of sizes that K-quants have, both ways of storing a minimum, and a table."""
    for fmt in ("q2_k_gguf", "q4_1_gguf", "iq4_nl_gguf"):
        weight, inputs = example(256 if "_k_" in fmt else COLS)
        hessian = inputs.T @ inputs
        errors = [round_with_report(weight, fmt, hessian=hessian, sweeps=sweeps)[1] for sweeps in (0, 2)]
        assert errors[1].measure == "hessian"
        assert errors[1].after < 0.97 * errors[0].after < errors[0].before


@pytest.mark.parametrize("fmt", ["q4_k_gguf", "nvfp4", "mxfp4", pytest.param("iq4_nl_gguf", marks=pytest.mark.long)])
def test_compiled_sweeps_are_as_good_as_their_definition(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit they are not: sums run in another order."""
    pytest.importorskip("numba")
    weight, inputs = example(256 if "_k_" in fmt else COLS)
    errors = []
    for smallest in (2**16, 0):
        monkeypatch.setattr(round_columns, "SMALLEST_FOR_CPU", smallest)
        errors.append(round_with_report(weight, fmt, hessian=inputs.T @ inputs)[1].after)
    assert errors[0] == pytest.approx(errors[1], rel=0.005)


@pytest.mark.parametrize("fmt", few(VECTORS, 2))
def test_columns_of_vectors_make_up_for_each_other(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at a time; sweeps gain, and compiled loops give the same before them, and after them as good numbers."""
    pytest.importorskip("numba")
    weight, inputs = example(256)
    hessian, after, before_sweeps = inputs.T @ inputs, [], []
    for smallest in (2**16, 0):
        monkeypatch.setattr(round_columns, "SMALLEST_FOR_CPU", smallest)
        encoded, report = round_with_report(weight, fmt, hessian=hessian)
        without_sweeps, unswept = round_with_report(weight, fmt, hessian=hessian, sweeps=0)
        before_sweeps.append(without_sweeps)
        assert report.after < 0.95 * unswept.after < 0.6 * report.before
        error = decode(encoded) - weight
        assert float((error @ hessian * error).sum() / (weight @ hessian * weight).sum()) < 1.1 * report.after
        after.append(report.after)
    assert torch.equal(before_sweeps[0].data, before_sweeps[1].data)
    assert after[0] == pytest.approx(after[1], rel=0.01)


def test_vectors_are_weighted_by_moments_and_by_outputs() -> None:
    weight, inputs = example(256)
    moments = round_with_report(weight, "iq3_s_gguf", moments=inputs.square().mean(0))[1]
    assert moments.after < moments.before
    grads = torch.randn(64, ROWS, generator=torch.Generator().manual_seed(1)) * torch.arange(1, ROWS + 1)
    both = round_with_report(weight, "iq3_s_gguf", hessian=inputs.T @ inputs, outputs=grads.T @ grads)[1]
    assert both.measure == "hessian and outputs"
    assert both.after < 0.6 * both.before


def test_only_q4_0_has_negative_scales() -> None:
    for fmt in ("int4_g32", "q4_0_poly", "int2"):
        rounded = round_weight(WEIGHT, fmt, hessian=HESSIAN)
        assert rounded.scales is not None
        assert bool((rounded.scales.float() >= 0).all()), fmt


def test_formats_with_nothing_to_choose_are_plain() -> None:
    for fmt in ("bfloat16", "uint8", "binary", "int16"):
        assert round_weight(WEIGHT, fmt, hessian=HESSIAN).to_bytes() == encode(WEIGHT, fmt).to_bytes()


def test_bad_statistics_are_refused() -> None:
    with pytest.raises(FormatError, match=r"`hessian` must have shape \(128, 128\), got \(127, 127\)"):
        round_weight(WEIGHT, "mxfp4", hessian=HESSIAN[1:, 1:], name="w")
    with pytest.raises(FormatError, match="NaN or infinity"):
        round_weight(WEIGHT, "mxfp4", moments=MOMENTS * torch.nan)
    with pytest.raises(FormatError, match="below zero"):
        round_weight(WEIGHT, "mxfp4", moments=-MOMENTS)
    with pytest.raises(FormatError, match="no input was seen"):
        round_weight(WEIGHT, "mxfp4", hessian=HESSIAN * 0)
    with pytest.raises(FormatError, match="not positive definite"):
        round_weight(WEIGHT, "mxfp4", hessian=torch.full((COLS, COLS), -3.0) + 4 * torch.eye(COLS))


def test_zeros_stay_zeros() -> None:
    assert not decode(round_weight(torch.zeros(4, 64), get_format("nvfp4"), hessian=HESSIAN[:64, :64])).any()


@pytest.mark.parametrize("fmt", ["q4_k_gguf", "int4_g32", pytest.param("nvfp4", marks=pytest.mark.long)])
def test_rows_make_up_for_each_other(fmt: str) -> None:
    generator = torch.Generator().manual_seed(1)
    _, inputs = example(cols := 256 if "_k_" in fmt else COLS)
    hessian = inputs.T @ inputs
    weight = torch.randn(48, cols, generator=generator)
    mixed = torch.randn(200, 8, generator=generator) @ torch.randn(8, 48, generator=generator)
    gradients = mixed + 0.3 * torch.randn(200, 48, generator=generator)
    outputs = gradients.T @ gradients

    def loss(values: Tensor) -> float:  # what a change of the outputs does along the gradients
        return float((gradients @ (values - weight) @ inputs.T).double().square().sum())

    alone = round_weight(weight, fmt, hessian=hessian)
    together, report = round_with_report(weight, fmt, hessian=hessian, outputs=outputs)
    assert together.data.shape == alone.data.shape
    assert loss(decode(together)) < 0.8 * loss(decode(alone))
    assert report.measure == "hessian and outputs"
    assert report.plain == 0
    assert report.after < report.before / 2


def test_outputs_without_gradients_or_rows_of_their_own_change_nothing() -> None:
    alone = round_weight(WEIGHT, "q4_0_gguf", hessian=HESSIAN)
    none = round_weight(WEIGHT, "q4_0_gguf", hessian=HESSIAN, outputs=torch.zeros(ROWS, ROWS))
    assert alone.to_bytes() == none.to_bytes()
    tiled = round_weight(WEIGHT, "fp8_e4m3_b128", hessian=HESSIAN)  # 128 rows share a scale
    assert (
        tiled.to_bytes() == round_weight(WEIGHT, "fp8_e4m3_b128", hessian=HESSIAN, outputs=torch.eye(ROWS)).to_bytes()
    )
    for outputs, hessian, message in (
        (torch.eye(3), HESSIAN, "layer: `outputs` must have shape"),
        (-torch.eye(ROWS), HESSIAN, "layer: `outputs` is not positive definite: .* diagonal are below zero"),
        (torch.eye(ROWS) - 9 * (1 - torch.eye(ROWS)), HESSIAN, "layer: `outputs` is not positive definite, even with"),
        (torch.eye(ROWS), None, "layer: `outputs` is used together with `hessian`"),
    ):
        with pytest.raises(FormatError, match=message):
            round_weight(WEIGHT, "q4_0_gguf", hessian=hessian, outputs=outputs, name="layer")


def test_layers_that_are_computed_as_one_are_rounded_with_one_base():
    plain = encode(WEIGHT, "nvfp4")
    assert plain.base is not None
    base = 2 * float(plain.base)
    rounded, report = round_with_report(WEIGHT, "nvfp4", hessian=HESSIAN, base=base)
    assert float(rounded.base) == base
    assert report.after < report.before
