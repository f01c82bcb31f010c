"""What the fused products read: which formats they take, how a launch is described, and scales in their order.

Scales are stored [K / 128, N, 4] instead of [N, K / 32], so that the scales of one step of a program lie together, and
a sector of memory is not fetched for four bytes of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from bitplan.base.loops.launch import INTERPRETED
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.triton_numbers import as_bits, scale_name

FUSED_FORMATS = frozenset(
    ("mxfp4", "nvfp4", "fp4_u8_g128", "int4_g32", "q4_0_gguf", "int8_row", "int8_g128", "fp8_e4m3_row")
)
QUAD = 4  # scales of a row that are kept side by side
WIDEST_STEP = 1024  # inputs of a step over all slices
# E8M0 bytes above this do not fit the bfloat16 multiplier of a decoded code.
LARGEST_E8M0 = 128
NVFP4_FACTOR = 2.0**9


@dataclass(frozen=True)
class MatmulLaunch:
    """How a product is cut up.

    A program takes `outputs` x `rows`, in steps of `slices` x `step` inputs, each slice summed by its own warps;
    `split` programs share one tile; `stages` steps are in flight. With `overlap` 1 a launch comes to the GPU while the
    kernel before it still runs, and waits there for its end, which saves 1 to 2 us (from Hopper on; elsewhere it is an
    ordinary launch). With `direct` 1 it is a launch of `direct.products`, whose slices are its warps.
    """

    outputs: int
    rows: int
    step: int
    slices: int
    split: int
    warps: int
    stages: int
    overlap: int = 0
    direct: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, int]) -> MatmulLaunch:
        return cls(**fields)


class ArrangedScales(NamedTuple):
    """What the kernel reads beside the codes: scales in its order, one factor (or one a row), and counters for split-K.

    The counters are zeros, and make two concurrent products on one weight (two streams) unsafe; one stream is always
    safe.
    """

    scales: Tensor
    factor: Tensor
    counters: Tensor

    def kind(self, fmt: Format) -> str:
        """How the kernel reads a scale."""
        if fmt.name == "nvfp4" and self.scales.dtype == torch.int8:
            return "e5m3"
        return scale_name(fmt)

    @property
    def nbytes(self) -> int:
        return self.scales.nbytes + self.factor.nbytes + self.counters.nbytes


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether a launch can come to the GPU while the kernel before it still runs: on NVIDIA's from Hopper on."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def why_not_fused(weight: Encoded, dtype: torch.dtype) -> str | None:
    """Why the fused kernel cannot run this weight for inputs of this type, or None."""
    if weight.device.type != "cuda" and not INTERPRETED:
        return f"the fused kernels run on CUDA, and the weight is on {weight.device.type}"
    if weight.fmt.name not in FUSED_FORMATS:
        return f"{weight.fmt.name} has no fused kernel"
    if dtype != torch.bfloat16:
        return f"the fused kernels take bfloat16 inputs, got {dtype}"
    if weight.shape[-1] % 32 or weight.fmt.padded_cols(weight.shape[-1]) != weight.shape[-1]:
        return f"rows of {weight.shape[-1]} are not whole blocks of {weight.fmt.name}"
    return None


def arrange_scales(weight: Encoded) -> ArrangedScales:
    """The scales in the kernel's order: [E, ceil(G / 4), N, 4], [E, G, N] for groups of 128, [E, N] for rows."""
    fmt, scales = weight.fmt, weight.scales
    assert scales is not None
    outputs = weight.shape[-2]
    factor = torch.ones((), dtype=torch.float32, device=weight.device)
    scales = as_bits(scales).reshape(-1, outputs, scales.shape[-1])
    if fmt.name == "nvfp4":
        scales = _without_subnormals(scales, weight.data)
    if fmt.name == "fp8_e4m3_row":
        holds_nan = (weight.data.view(torch.uint8) & 0x7F == 0x7F).any(-1)
        scales = torch.where(holds_nan.reshape(scales.shape), torch.nan, scales)  # the decoder knows no NaN
    if fmt.power_of_two_scales:
        scales, factor = _within_multiplier(scales, factor)
    if weight.base is not None:
        factor = weight.base.float() * (NVFP4_FACTOR if fmt.name == "nvfp4" else 1.0)
    if fmt.block.cols == 128:
        scales = scales.transpose(1, 2).contiguous()
    elif fmt.block.cols is not None:
        groups, whole = scales.shape[-1], WIDEST_STEP // fmt.block.cols  # a step may read past the last group
        padded = torch.nn.functional.pad(scales, (0, -groups % whole))
        scales = padded.unflatten(-1, (-1, QUAD)).transpose(1, 2).contiguous()
    else:
        scales = scales.squeeze(-1)
    return ArrangedScales(scales.contiguous(), factor, _counters(outputs, weight.device))


def join_scales(parts: Sequence[ArrangedScales]) -> ArrangedScales | None:
    """Join those of weights below each other; None where they are stored in different ways. One's are not copied."""
    scales = [part.scales for part in parts]
    if any(each.dtype != scales[0].dtype for each in scales):
        return None
    axis = 1 if scales[0].dim() == 2 else 2
    factors = [part.factor.expand(part.scales.shape[axis]) for part in parts]
    joined = scales[0] if len(parts) == 1 else torch.cat(scales, dim=axis)
    factor = factors[0].contiguous() if len(parts) == 1 else torch.cat(factors)
    return ArrangedScales(joined, factor, _counters(joined.shape[axis], joined.device))


def _counters(outputs: int, device: torch.device) -> Tensor:
    return torch.zeros(8 * triton.cdiv(outputs, 16), dtype=torch.int32, device=device)


def _within_multiplier(scales: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """E8M0 bytes brought to at most 128, with the power of two taken out as a factor; NaN (255) becomes infinity.

    Scales 2^126 below the largest come out as zero: far below what a float32 sum can see.
    """
    is_nan = scales == 255
    largest = torch.where(is_nan, 0, scales).amax().int() if scales.numel() else torch.zeros((), dtype=torch.int32)
    shift = (largest - LARGEST_E8M0).clamp(min=0)
    shifted = torch.where(is_nan, LARGEST_E8M0 + 1, (scales.int() - shift).clamp(min=0)).to(torch.uint8)
    return shifted, torch.ldexp(factor, shift.to(factor.device))


def _without_subnormals(scales: Tensor, data: Tensor) -> Tensor:
    """E4M3 bytes as 5 bits of exponent and 3 of mantissa (int8), which the kernel decodes by one multiplication.

    They stay as they are (uint8) where one is NaN or negative, where a block of scale 0 has codes that are not 0, and
    while a CUDA graph is recorded, in which nobody may look.
    """
    if scales.is_cuda and torch.cuda.is_current_stream_capturing():
        return scales
    blocks = data.reshape(*scales.shape, -1)
    odd = (scales >= 0x7F) | ((scales == 0) & ((blocks & 0x77) != 0).any(-1))
    if bool(odd.any()):
        return scales
    table = torch.arange(256, dtype=torch.int32)
    table += 13 << 3
    for mantissa in range(1, 8):
        power = mantissa.bit_length() - 1
        table[mantissa] = (11 + power) << 3 | (mantissa - (1 << power)) << (3 - power)
    table[0] = 0
    return table.to(torch.uint8).to(scales.device)[scales.int()].view(torch.int8)
