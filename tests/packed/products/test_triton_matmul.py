"""The fused products against `decode`: exactly through an identity matrix, to a bound through random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from bitplan.packed.products import fused_few_rows as tm
from bitplan.packed.products.direct_products import direct_launch
from bitplan.packed.products.expert_routing import route
from bitplan.packed.products.fused_few_rows import MatmulLaunch
from bitplan.packed.products.fused_many_rows import split_inputs
from tests.crosses import few

FORMATS = sorted(tm.FUSED_FORMATS)
LAUNCHES = [
    MatmulLaunch(32, 32, 128, 2, 1, 2, 3),
    MatmulLaunch(16, 32, 128, 1, 2, 1, 2),
    MatmulLaunch(64, 128, 128, 1, 2, 4, 3),  # more than 32 rows a tile: triton_wide
]
DIRECT = [direct_launch(32, 16, 1, 3), direct_launch(16, 8, 4, 4, run=2)]


def every_code(name: str, outputs: int, inputs: int, device: torch.device) -> Encoded:
    """A weight whose bytes run through every value, under scales that differ from block to block."""
    fmt = get_format(name)
    parts = fmt.part_shapes((outputs, inputs))
    scale_dtype, scale_shape = parts["scales"]
    count = torch.arange(torch.Size(scale_shape).numel(), device=device).reshape(scale_shape)
    if scale_dtype == torch.uint8:
        scales = (110 + count * 7 % 19).to(torch.uint8)
    else:
        scales = ((count * 5 % 13 + 1) * 0.125 * torch.where(count % 2 == 0, 1.0, 1.125)).to(scale_dtype)
    data_dtype, data_shape = parts["data"]
    codes = torch.arange(torch.Size(data_shape).numel(), device=device) * 101 % 256
    if name == "fp8_e4m3_row":
        codes = torch.where(codes % 128 == 127, 0, codes)  # NaN times zero in another row of the sum is NaN too
    data = codes.to(torch.uint8).reshape(data_shape).view(data_dtype)
    base = {"base": torch.tensor(0.5, device=device)} if "base" in parts else {}
    return Encoded(fmt, (outputs, inputs), data, scales, **base)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.cross("launch", LAUNCHES, ids=str)
@pytest.mark.cross("name", FORMATS)
def test_identity_gives_back_every_code_as_decode_does(name: str, launch: MatmulLaunch, device: torch.device) -> None:
    weight = every_code(name, 24, 256, device)
    identity = torch.eye(256, dtype=torch.bfloat16, device=device)
    got = tm.fused_matmul(identity, weight, tm.arrange_scales(weight), None, launch)
    expected = decode(weight, torch.bfloat16).T
    assert torch.equal(got, expected)


@pytest.mark.cross("launch", DIRECT, ids=str)
@pytest.mark.cross("name", few(FORMATS, 4))
def test_the_direct_kernel_gives_back_every_code(name: str, launch: MatmulLaunch, device: torch.device) -> None:
    weight = every_code(name, 24, 384, device)
    inputs = torch.arange(launch.rows + 1, device=device) * 47 % 384  # of low and of high nibbles
    identity = torch.eye(384, dtype=torch.bfloat16, device=device)[inputs]
    got = tm.fused_matmul(identity, weight, tm.arrange_scales(weight), None, launch)
    assert torch.equal(got, decode(weight, torch.bfloat16).T[inputs])


@pytest.mark.cross("shape", [(64, 256, 1), (40, 384, 5), (33, 1408, 17), (80, 384, 40)], ids=str)
@pytest.mark.cross("name", FORMATS)
def test_random_numbers_with_bias(name: str, shape: tuple[int, int, int], device: torch.device) -> None:
    outputs, inputs, rows = shape
    weight = encode(torch.randn(outputs, inputs), name)
    x, bias = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs)
    on_device = weight.to(device)
    got = tm.fused_matmul(x.to(device), on_device, tm.arrange_scales(on_device), bias.to(device)).cpu()
    expected = x.double() @ decode(weight, torch.float64).T + bias.double()
    # Weights rounded to bfloat16 (int4_g32, q4_0_gguf) and the rounded result: 2^-9 each, mostly averaged away.
    assert relative_error(got, expected) < 4e-3


@pytest.mark.parametrize("rows", [1, 9, 32, 130])
def test_every_candidate_is_right(rows: int, device: torch.device) -> None:
    weight = every_code("mxfp4", 64, 512, device)
    x = torch.randn(rows, 512).bfloat16().to(device)
    expected = x.double() @ decode(weight, torch.float64).T
    arranged = tm.arrange_scales(weight)
    launches = tm.candidate_launches(weight, rows)
    assert tm.default_launch(weight, rows).rows == launches[0].rows
    for launch in launches if device.type == "cuda" else launches[::3]:
        got = tm.fused_matmul(x, weight, arranged, None, launch)
        assert relative_error(got, expected) < 4e-3, launch


@pytest.mark.parametrize(
    "launch", [MatmulLaunch(32, 8, 128, 1, 4, 1, 2), MatmulLaunch(64, 64, 128, 1, 4, 4, 3)], ids=str
)
def test_the_split_counters_are_left_at_zero(launch: MatmulLaunch, device: torch.device) -> None:
    weight = encode(torch.randn(32, 1024), "mxfp4").to(device)
    arranged = tm.arrange_scales(weight)
    x = torch.randn(1, 1024).bfloat16().to(device)
    first = tm.fused_matmul(x, weight, arranged, None, launch)
    assert int(arranged.counters.abs().sum()) == 0
    assert torch.equal(first, tm.fused_matmul(x, weight, arranged, None, launch))


def test_mxfp4_scales_above_the_multiplier_and_nan(device: torch.device) -> None:
    """Bytes above 128 are brought down with a factor; byte 255 must poison its outputs, never vanish."""
    weight = every_code("mxfp4", 16, 128, device)
    assert weight.scales is not None
    weight.scales[0, 0] = 200
    identity = torch.eye(128, dtype=torch.bfloat16, device=device)
    got = tm.fused_matmul(identity, weight, tm.arrange_scales(weight))
    expected = decode(weight, torch.bfloat16).T
    assert torch.equal(got, expected)
    weight.scales[1, 0] = 255
    with np.errstate(invalid="ignore"):  # the interpreter is numpy, which warns of 0 x infinity
        got = tm.fused_matmul(identity, weight, tm.arrange_scales(weight))
    assert not got[:, 1].isfinite().any()
    assert torch.equal(got[:, 2:], expected[:, 2:])


@pytest.mark.cross("name", ["mxfp4", "int8_row", "int8_g128", "q4_0_gguf"])
@pytest.mark.cross(("tokens", "top_k"), [(0, 2), (3, 5), (9, 2)])
def test_experts(name: str, tokens: int, top_k: int, device: torch.device) -> None:
    experts, outputs, inputs = 5, 48, 128
    weight = encode(torch.randn(experts, outputs, inputs), name)
    dense, bias = decode(weight, torch.float64), torch.randn(experts, outputs).bfloat16()
    ids = (
        torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
        if tokens
        else torch.empty(0, top_k).long()
    )
    x = torch.randn(tokens, inputs).bfloat16()
    on_device = weight.to(device)
    arranged, routing = tm.arrange_scales(on_device), route(ids.to(device), experts)
    got = tm.fused_experts(x.to(device), on_device, arranged, routing, bias.to(device))
    chosen = ids.reshape(-1)
    of_token = x.double().repeat_interleave(top_k, dim=0)
    expected = torch.einsum("pk,pnk->pn", of_token, dense[chosen]) + bias.double()[chosen]
    assert got.shape == expected.shape
    if tokens:
        assert relative_error(got.cpu(), expected) < 4e-3
        each = torch.randn(tokens * top_k, inputs).bfloat16()
        got = tm.fused_experts(each.to(device), on_device, arranged, routing, per_pair=True)
        assert relative_error(got.cpu(), torch.einsum("pk,pnk->pn", each.double(), dense[chosen])) < 4e-3


def test_all_tokens_on_one_expert(device: torch.device) -> None:
    weight = encode(torch.randn(4, 32, 128), "mxfp4").to(device)
    x = torch.randn(50, 128).bfloat16().to(device)
    routing = route(torch.full((50, 1), 2, device=device), 4)
    got = tm.fused_experts(x, weight, tm.arrange_scales(weight), routing)
    assert relative_error(got, x.double() @ decode(weight, torch.float64)[2].T) < 4e-3


@pytest.mark.parametrize("tokens", [2, 30])
def test_an_id_that_no_expert_has_gives_nan_in_its_row_alone(tokens: int, device: torch.device) -> None:
    weight = encode(torch.randn(3, 40, 128), "mxfp4").to(device)
    x = torch.randn(tokens, 128).bfloat16().to(device)
    ids = torch.arange(tokens, device=device)[:, None] % 3
    ids[0], ids[tokens // 2] = 3, -1
    got = tm.fused_experts(x, weight, tm.arrange_scales(weight), route(ids, 3))
    bad = torch.zeros(tokens, dtype=torch.bool, device=device)
    bad[0] = bad[tokens // 2] = True
    assert torch.equal(got.isnan(), bad[:, None].expand_as(got))


def test_refusals_say_why(device: torch.device) -> None:
    weight = encode(torch.randn(32, 128), "mxfp4").to(device)
    arranged = tm.arrange_scales(weight)
    x = torch.randn(2, 128).bfloat16().to(device)
    with pytest.raises(FormatError, match=r"bfloat16 inputs, got torch.float32; use strategy 'decode' or 'auto'"):
        tm.fused_matmul(x.float(), weight, arranged)
    with pytest.raises(FormatError, match=r"contiguous \[rows, 128\], got \(2, 64\)"):
        tm.fused_matmul(x[:, :64].contiguous(), weight, arranged)
    with pytest.raises(FormatError, match=r"bias must have shape \(32,\), got \(31,\)"):
        tm.fused_matmul(x, weight, arranged, torch.zeros(31, device=device))
    with pytest.raises(FormatError, match="ternary has no fused kernel"):
        tm.fused_matmul(x, encode(torch.randn(32, 128), "ternary").to(device), arranged)
    with pytest.raises(FormatError, match="take 1 rows, got 2"):
        tm.fused_experts(
            x,
            encode(torch.randn(2, 32, 128), "mxfp4").to(device),
            arranged,
            route(torch.zeros(1, 2).long().to(device), 2),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 4])
def test_launches_that_overlap_wait_for_each_other(split: int) -> None:
    """Each product reads what the one before wrote; a launch that did not wait would read the one before that."""
    weight = encode(torch.randn(4096, 4096, device="cuda") / 64, "mxfp4")
    arranged = tm.arrange_scales(weight)
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    results = []
    for overlap in (0, 1):
        y = x
        for _ in range(50):
            y = tm.fused_matmul(y, weight, arranged, None, MatmulLaunch(32, 8, 128, 2, split, 2, 3, overlap))
            y = y / y.norm()
        results.append(y)
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


@pytest.mark.gpu
def test_the_faster_decoder_is_trusted_on_this_gpu() -> None:
    device = torch.device("cuda")
    launch = MatmulLaunch(64, 8, 128, 2, 1, 2, 3)
    assert tm.words_for(get_format("mxfp4"), launch, device) == "0213"
    assert tm.words_for(get_format("q4_0_gguf"), launch, device) == "0123"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g32", "fp4_u8_g128"])
def test_both_decoders_give_every_code(name: str) -> None:
    weight = every_code(name, 64, 512, torch.device("cuda"))
    identity = torch.eye(512, dtype=torch.bfloat16, device="cuda")
    launch = MatmulLaunch(64, 32, 128, 2, 1, 2, 3)
    for words in ("0123", "0213"):
        out = torch.full((512, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
        tm._launch(identity, weight, tm.arrange_scales(weight), None, out, launch, 16, None, per_pair=True, words=words)
        assert torch.equal(out, decode(weight, torch.bfloat16).T), words


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("mxfp4", range(0, 64, 2), range(1, 64, 2)),
        ("q4_0_gguf", [*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]),
    ],
)
def test_inputs_are_split_into_what_low_and_high_nibbles_meet(name, low, high):
    x = torch.arange(128).view(2, 64)
    split = split_inputs(x, get_format(name))
    assert torch.equal(split, torch.stack([x[:, list(low)], x[:, list(high)]]))


def test_inputs_of_codes_of_eight_bits_stay_whole():
    x = torch.zeros(2, 64)
    assert split_inputs(x, get_format("int8_row")) is x
