"""Types of numbers by their names in torch, so that layouts are known before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def wider_types(name: str) -> str:
    """The types to take for numbers beyond the range of one."""
    return {"bfloat16": "float32", "float32": "float64"}.get(name, "bfloat16 or float32")


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a type, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of this name."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
