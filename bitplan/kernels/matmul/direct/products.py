"""Products over packed codes without shared memory: up to 16 rows of x, on NVIDIA's GPUs from Ampere on.

What it is for: a product of one row ends when its bytes have come, and a kernel that stages them in shared memory, or
whose programs add up their parts through memory, adds microseconds to each of the hundreds of products of a token.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.formats.encoded import Encoded
from bitplan.formats.registry import get_format
from bitplan.kernels.base.launch import PreparedLaunch
from bitplan.kernels.base.numbers import INTERPRETED
from bitplan.kernels.matmul.direct.kernel import direct_kernel
from bitplan.kernels.matmul.fused_weights import ArrangedScales, MatmulLaunch, can_overlap

MOST_ROWS = 16
STEP = 128  # inputs that a warp takes at a time


def runs_direct(device: torch.device) -> bool:
    """Whether the kernel can run here: tensor cores multiply bfloat16 from Ampere on."""
    if torch.version.hip is not None:
        return False
    return bool(INTERPRETED) or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def direct_launch(outputs: int, rows: int, warps: int, stages: int, run: int = 1) -> MatmulLaunch:
    """Programs of `warps` warps for a tile of outputs x rows, `stages` steps of codes in registers.

    A warp's step is 128 inputs (64 of 8-bit codes), `run` steps lie side by side.
    """
    return MatmulLaunch(outputs, rows, run * STEP, warps, 1, warps, stages, overlap=1, direct=1)


def prepare_direct(
    device: torch.device, weight: Encoded, arranged: ArrangedScales, bias: str, rows: int, launch: MatmulLaunch
) -> PreparedLaunch:
    """All of a launch but its pointers: x, out, codes, scales, factor, bias."""
    overlap = launch.overlap == 1 and can_overlap(device)
    return _prepared(
        weight.fmt.name,
        weight.shape,
        launch,
        rows,
        bias,
        arranged.kind(weight.fmt),
        arranged.factor.dim() == 1 or weight.fmt.block.cols is None,
        overlap,
        device,
    )


def direct_pointers(weight: Encoded, arranged: ArrangedScales, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Codes, scales, factor and bias; the scales of whole rows are factors."""
    scales, factor = arranged.scales, arranged.factor
    if weight.fmt.block.cols is None:
        scales, factor = factor, scales
    return weight.data, scales, factor, arranged.factor if bias is None else bias.contiguous()


@functools.lru_cache(4096)
def _prepared(
    format_name: str,
    shape: tuple[int, int],
    launch: MatmulLaunch,
    rows: int,
    bias: str,
    scale: str,
    factors: bool,
    overlap: bool,
    device: torch.device,  # noqa: ARG001 (a launch is for one)
) -> PreparedLaunch:
    fmt, (outputs, inputs) = get_format(format_name), shape
    assert fmt.element is not None
    tiles_of_x, tiles = launch.rows // 8, launch.outputs // 16
    if launch.rows not in (8, MOST_ROWS) or launch.slices != launch.warps:
        raise FormatError(f"{fmt.name}: {launch} is no launch of the direct kernel")
    constants = {
        "N": outputs,
        "K": inputs,
        "ELEMENT": fmt.element.name,
        "SCALE": scale,
        "ORDER": fmt.packing.order if fmt.packing is not None else "bytes",
        "GROUP": fmt.block.cols or 0,
        "FACTORS": factors,
        "BIAS": bias,
        "ONE_ROW": rows == 1,
        "X": tiles_of_x,
        "R": tiles,
        "W": launch.warps,
        "RUN": launch.step // STEP,
        "STAGES": launch.stages,
        "WORDS": "none" if INTERPRETED else "0213",
        "OVERLAP": overlap,
    }
    of_scales = {"e8m0": torch.uint8, "u8": torch.uint8, "f32": torch.int32}.get(scale, torch.int16)
    types = {0: torch.int32, 2: torch.int32, 3: of_scales}
    options = {"num_warps": launch.warps, **({"launch_pdl": True} if overlap else {})}
    grid = (triton.cdiv(outputs, launch.outputs), triton.cdiv(rows, launch.rows))
    return PreparedLaunch(direct_kernel, grid, (rows,), constants, types=types, **options)
