"""Small floats with scales: FP8 by tensor, row or tile, and the microscaling formats, kept as they are where possible.

Scales of 16 bits are widened to float32, which is exact. One scale for a tensor is written for every row, so that the
weight can run packed. `list_weights` is of FP8 folders: DeepSeek's, with a float32 scale for every 128 x 128 tile, and
those with one for a row or a tensor.

| part | type | shape |
|---|---|---|
| NAME.weight | float8_e4m3fn | [rows, cols] |
| NAME.weight_scale_inv | float32 or bfloat16 | [rows / 128, cols / 128], rounded up; weight = codes * scale |
| NAME.weight_scale | the same | one number, or one for each row |
| NAME.input_scale | | of activations, which are not quantized here: left out |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bitplan.base.documents import show
from bitplan.files.schemes.integers import pieces
from bitplan.files.schemes.tensors import FLOATS, QuantizedFolder, SchemeWeight, is_tile
from bitplan.formats import get_format

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded

FP8 = ("float8_e4m3fn", "float8_e5m2")
SCALES = (*FLOATS, "float8_e8m0fnu")
TILE = (128, 128)
_EXPONENTS = ("uint8", "float8_e8m0fnu")
ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "activation_scale")


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    tile = folder.settings.get("weight_block_size") or TILE
    if not is_tile(tile):
        folder.refuse(f"config.json: quantization_config: weight_block_size is {show(tile)}, not two sizes")
    tensors = folder.checkpoint.tensors
    for name, entry in tensors.items():
        scales = next((suffixed for suffixed in (f"{name}_scale_inv", f"{name}_scale") if suffixed in tensors), None)
        if entry.dtype in FP8 and scales is not None:
            owner = name.rpartition(".")[0]
            beside = tuple(name_beside for part in ACTIVATION_SCALES if (name_beside := f"{owner}.{part}") in tensors)
            yield fp8_weight(folder, name, name, scales, (tile[0], tile[1]), beside)


def fp8_weight(
    folder: QuantizedFolder, name: str, codes: str, scales: str, tile: tuple[int, int], beside: tuple[str, ...] = ()
) -> SchemeWeight:
    """FP8 codes [rows, cols] times scales of the tensor, of rows, of tiles, or (as bytes) of 32 in a row."""
    data = folder.part(codes, FP8, (None, None), of=name)
    shape = rows, cols = data.shape[0], data.shape[1]
    scale = folder.part(scales, (*SCALES, "uint8"), of=name)
    if not rows or not cols:
        folder.stop(name, f"{codes!r} is empty: {list(shape)}")
    kind = data.dtype.removeprefix("float8_").removesuffix("fn")
    label, reason = f"fp8_{kind}", "the same codes and scales"
    fmt: str | None = None
    block = shape
    is_microscaling = scale.dtype == "float8_e8m0fnu" and scale.shape == (rows, -(-cols // 32))
    if scale.dtype == "uint8" or is_microscaling:
        folder.part(scales, _EXPONENTS, (rows, -(-cols // 32)), of=name)
        label, fmt = f"mxfp8_{kind}", "mxfp8_e4m3" if kind == "e4m3" and cols % 32 == 0 else None
        block = (1, 32)
    elif math.prod(scale.shape) == 1:
        fmt, reason = "fp8_e4m3_row", "the same codes, and the tensor's scale for each row"
    elif scale.shape in ((rows, 1), (rows,)):
        label, fmt, block = f"{label}_row", "fp8_e4m3_row", (1, cols)
    elif scale.shape == (-(-rows // tile[0]), -(-cols // tile[1])):
        label, block = f"{label}_b{tile[0]}" + ("" if tile[0] == tile[1] else f"x{tile[1]}"), tile
        fmt = "fp8_e4m3_b128" if tile == TILE else None
    else:
        folder.stop(name, f"{list(scale.shape)} scales fit neither rows nor {list(tile)} tiles of {list(shape)} codes")
    if fmt is None or kind != "e4m3":
        fmt, reason = None, f"no format of bitplan has {kind} with a scale for {block[0]} x {block[1]}"
    read: Callable[[], Tensor | Encoded]
    if fmt is None:
        read = functools.partial(_decode, folder, codes, scales, block)
    else:
        read = functools.partial(_keep, folder, fmt, codes, scales)
    parts = (codes, scales, *beside)
    return SchemeWeight(name, shape, folder.dtype_name, format=fmt, parts=parts, label=label, reason=reason, read=read)


def fp4_weight(
    folder: QuantizedFolder,
    name: str,
    codes: str,
    scales: str,
    base: str | None,
    beside: tuple[str, ...] = (),
    *,
    fmt: str | None = None,
    base_divides: bool = True,
) -> SchemeWeight:
    """E2M1 codes, two to a byte, with scales of 32 as exponents, or of 16 in E4M3 with one factor for the tensor.

    fmt            mxfp4 or nvfp4; None: nvfp4 if there is a factor
    base_divides   the file has the factor's reciprocal
    """
    data = folder.part(codes, ("uint8",), (None, None), of=name)
    shape = rows, cols = data.shape[0], 2 * data.shape[1]
    fmt = fmt or ("mxfp4" if base is None else "nvfp4")
    dtypes, block = (_EXPONENTS, 32) if fmt == "mxfp4" else (("float8_e4m3fn",), 16)
    if not rows or not cols or cols % block:
        folder.stop(name, f"rows of {cols} codes are not whole blocks of {block}")
    folder.part(scales, dtypes, (rows, cols // block), of=name)
    reason, parts = "the same codes and scales", [codes, scales]
    if base is not None:
        if math.prod(folder.part(base, ("float32",), of=name).shape) != 1:
            folder.stop(name, f"{base!r} must be one number")
        parts = [*parts, base]
        if base_divides:
            reason += f"; its factor is 1 / {base.rpartition('.')[2]}, rounded to float32"
    read = functools.partial(_keep, folder, fmt, codes, scales, base, base_divides)
    stored = (*parts, *beside)
    return SchemeWeight(name, shape, folder.dtype_name, format=fmt, parts=stored, label=fmt, reason=reason, read=read)


def _keep(
    folder: QuantizedFolder, fmt: str, codes: str, scales: str, base: str | None = None, base_divides: bool = False
) -> Encoded:
    import torch

    from bitplan.formats import Encoded

    ours, data = get_format(fmt), folder.read(codes)
    shape = (data.shape[0], data.shape[1] * (1 if ours.packing is None else ours.packing.per_byte))
    dtype, size = ours.part_shapes(shape)["scales"]
    stored = folder.read(scales)
    stored = stored.view(dtype) if stored.dtype == torch.float8_e8m0fnu and dtype == torch.uint8 else stored.to(dtype)
    if stored.numel() == 1:
        stored = stored.reshape(()).expand(size).contiguous()
    factor = None
    if ours.scales is not None and ours.scales.needs_base:
        factor = torch.ones(()) if base is None else folder.read(base).reshape(())
        factor = factor.reciprocal() if base_divides else factor
    return Encoded(ours, shape, data, stored.reshape(size), factor)


def _decode(folder: QuantizedFolder, codes: str, scales: str, block: tuple[int, int]) -> Tensor:
    import torch

    from bitplan.formats.elements import torch_dtype

    data, stored = folder.read(codes), folder.read(scales)
    bits = stored.dtype == torch.uint8
    factors = (stored.view(torch.float8_e8m0fnu) if bits else stored).float().reshape(-1, -(-data.shape[1] // block[1]))
    out = torch.empty(data.shape, dtype=torch_dtype(folder.dtype_name))
    across = torch.arange(data.shape[1]) // block[1]
    for rows in pieces(*data.shape):
        down = torch.arange(rows.start, rows.stop) // block[0]
        out[rows] = (data[rows].float() * factors[down][:, across]).to(out.dtype)
    return out
