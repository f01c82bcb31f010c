"""Small folders in other libraries' layouts, packed by plain NumPy as those layouts are documented, with their numbers.

Nothing here is bitplan's: a code is placed bit by bit, so that a reader is checked against another hand's packing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

ROWS, COLS = 32, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Numbers = dict[str, torch.Tensor]
Ints = NDArray[np.int64]


def stream(codes: Ints, bits: int) -> NDArray[np.int32]:
    """[n, m] codes -> [n, m * bits / 32]: each row a stream of bits, lowest first."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32)), dtype=np.uint32)
    for at in range(count):
        for bit in range(bits):
            place = at * bits + bit
            words[:, place // 32] |= ((codes[:, at] >> bit) & 1).astype(np.uint32) << np.uint32(place % 32)
    return words.view(np.int32)


def write(
    folder: Path,
    tensors: dict[str, Any],
    said: dict[str, Any],
    metadata: dict[str, str] | None = None,
    key: str = "quantization_config",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    held = {
        name: one.clone() if isinstance(one, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(one).copy())
        for name, one in tensors.items()
    }
    held["norm.weight"] = torch.ones(COLS, dtype=torch.float16)
    save_file(held, folder / "model.safetensors", metadata=metadata or {"format": "pt"})
    config = {"model_type": "llama", "dtype": "float16", key: said}
    (folder / "config.json").write_text(json.dumps(config))


def gptq(
    folder: Path, *, bits: int = 4, group: int = 128, sym: bool = True, desc_act: bool = False, v2: bool = False
) -> Numbers:
    rng = np.random.default_rng(bits * 1000 + group)
    groups = -(-COLS // group)
    codes = rng.integers(0, 2**bits, (ROWS, COLS))
    zeros = np.full((ROWS, groups), 2 ** (bits - 1)) if sym else rng.integers(1, 2**bits, (ROWS, groups))
    scales = rng.uniform(0.01, 0.1, (ROWS, groups)).astype(np.float16)
    of = np.arange(COLS) // group
    if desc_act:
        of = rng.permutation(of)
    tensors = {
        "a.qweight": stream(codes, bits).T,
        "a.qzeros": stream((zeros if v2 else zeros - 1).T, bits),
        "a.scales": scales.T,
        "a.g_idx": of.astype(np.int32),
    }
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym}
    write(folder, tensors, {**said, "checkpoint_format": "gptq_v2" if v2 else "gptq"})
    return {"a.weight": torch.from_numpy((codes - zeros[:, of]).astype(np.float32) * scales.astype(np.float32)[:, of])}


def awq(folder: Path) -> Numbers:
    rng = np.random.default_rng(7)
    group = 64
    codes, zeros = rng.integers(0, 16, (COLS, ROWS)), rng.integers(0, 16, (COLS // group, ROWS))
    scales = rng.uniform(0.01, 0.1, (COLS // group, ROWS)).astype(np.float16)

    def packed(values: Ints) -> NDArray[np.int32]:
        words = np.zeros((len(values), ROWS // 8), dtype=np.uint32)
        for word in range(ROWS // 8):
            for nibble in range(8):
                words[:, word] |= values[:, 8 * word + AWQ_ORDER[nibble]].astype(np.uint32) << np.uint32(4 * nibble)
        return words.view(np.int32)

    tensors = {"a.qweight": packed(codes), "a.qzeros": packed(zeros), "a.scales": scales}
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    write(folder, tensors, said)
    numbers = (codes - zeros.repeat(group, 0)).astype(np.float32) * scales.astype(np.float32).repeat(group, 0)
    return {"a.weight": torch.from_numpy(numbers.T.copy()).half().float()}


def compressed(folder: Path) -> Numbers:
    """A module of each kind: int4 in groups of 32 and of 64 with zero points, int8, FP8 by row and by tile."""
    rng = np.random.default_rng(3)
    codes = rng.integers(-8, 8, (ROWS, COLS))
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, (ROWS, COLS // 32)).astype(np.float32)).bfloat16()
    zeros = rng.integers(-8, 8, (ROWS, COLS // 64))
    wide = torch.from_numpy(rng.uniform(0.01, 0.1, (ROWS, COLS // 64)).astype(np.float32)).bfloat16()
    bytes8 = torch.from_numpy(rng.integers(-128, 128, (ROWS, COLS)).astype(np.int8))
    rows = torch.from_numpy(rng.uniform(0.01, 0.1, (ROWS, 1)).astype(np.float32)).bfloat16()
    floats = torch.from_numpy(rng.uniform(-400, 400, (ROWS, COLS)).astype(np.float32)).to(torch.float8_e4m3fn)
    tiles = torch.from_numpy(rng.uniform(0.01, 0.1, (1, COLS // 128)).astype(np.float32))
    size = np.array([ROWS, COLS])
    tensors = {
        "a.weight_packed": stream(codes + 8, 4),
        "a.weight_scale": scales,
        "a.weight_shape": size,
        "b.weight_packed": stream(codes + 8, 4),
        "b.weight_scale": wide,
        "b.weight_shape": size,
        "b.weight_zero_point": stream((zeros + 8).T, 4).T,
        "c.weight": bytes8,
        "c.weight_scale": rows,
        "c.input_scale": torch.ones(1),
        "d.weight": floats,
        "d.weight_scale": rows,
        "e.weight": floats,
        "e.weight_scale": tiles,
    }
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}},
        "group_1": {"targets": ["re:e"], "weights": {"num_bits": 8, "type": "float", "block_structure": [128, 128]}},
    }
    write(folder, tensors, {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups})
    q = torch.from_numpy(codes.astype(np.float32))
    z = torch.from_numpy(zeros.astype(np.float32)).repeat_interleave(64, 1)
    return {
        "a.weight": q * scales.float().repeat_interleave(32, 1),
        "b.weight": ((q - z) * wide.float().repeat_interleave(64, 1)).bfloat16().float(),
        "c.weight": bytes8.float() * rows.float(),
        "d.weight": floats.float() * rows.float(),
        "e.weight": floats.float() * tiles.repeat_interleave(128, 1),
    }


def fp8(folder: Path) -> Numbers:
    rng = np.random.default_rng(5)
    rows, cols = 130, COLS
    codes = torch.from_numpy(rng.uniform(-400, 400, (rows, cols)).astype(np.float32)).to(torch.float8_e4m3fn)
    tiles = torch.from_numpy(rng.uniform(0.01, 0.1, (2, 2)).astype(np.float32))
    one = torch.tensor([0.25])
    tensors = {"a.weight": codes, "a.weight_scale_inv": tiles, "b.weight": codes, "b.weight_scale": one}
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write(folder, tensors | {"b.input_scale": torch.ones(1)}, said)
    wide = tiles.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    return {"a.weight": codes.float() * wide, "b.weight": codes.float() * 0.25}


def bitsandbytes(folder: Path) -> Numbers:
    """NF4 with nested scales, and LLM.int8."""
    rng = np.random.default_rng(11)
    count, block, outer = ROWS * COLS, 64, 32
    codes = rng.integers(0, 16, count)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)  # a file brings its own sixteen numbers
    absmax = rng.integers(0, 256, count // block).astype(np.uint8)
    levels = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    largest = rng.uniform(0.01, 0.1, count // block // outer).astype(np.float32)
    state = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "float16",
        "shape": [ROWS, COLS],
        "nested_blocksize": outer,
        "nested_dtype": "float32",
        "nested_offset": 0.5,
    }
    bytes8 = torch.from_numpy(rng.integers(-127, 128, (ROWS, COLS)).astype(np.int8))
    tops = torch.from_numpy(rng.uniform(0.1, 1, ROWS).astype(np.float32))
    tensors = {
        "a.weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8).reshape(-1, 1),
        "a.weight.absmax": absmax,
        "a.weight.quant_map": table,
        "a.weight.nested_absmax": largest,
        "a.weight.nested_quant_map": levels,
        "a.weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        "b.weight": bytes8,
        "b.SCB": tops,
        "b.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    write(folder, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    scales = levels[absmax] * largest.repeat(outer) + np.float32(0.5)
    numbers = torch.from_numpy((table[codes] * scales.repeat(block)).reshape(ROWS, COLS)).half().float()
    return {"a.weight": numbers, "b.weight": bytes8.float() * (tops / torch.tensor(127.0))[:, None]}


def torchao(folder: Path) -> Numbers:
    """Integers with zero points in groups of 64, int8 by row and FP8 by row."""
    rng = np.random.default_rng(13)
    codes = torch.from_numpy(rng.integers(-8, 8, (ROWS, COLS)).astype(np.int8))
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, (ROWS, COLS // 64)).astype(np.float32)).bfloat16()
    zeros = torch.from_numpy(rng.integers(-8, 8, (ROWS, COLS // 64)).astype(np.int8))
    rows = torch.from_numpy(rng.uniform(0.01, 0.1, (ROWS, 1)).astype(np.float32))
    floats = torch.from_numpy(rng.uniform(-400, 400, (ROWS, COLS)).astype(np.float32)).to(torch.float8_e4m3fn)
    tensors = {
        "m._a_qdata": codes,
        "m._a_scale": scales,
        "m._a_zero_point": zeros,
        "m._b_qdata": codes,
        "m._b_scale": rows,
        "m._b_zero_point": torch.zeros(ROWS, 1, dtype=torch.int8),
        "m._c_qdata": floats,
        "m._c_scale": rows,
    }
    dtype = {"_type": "torch.dtype", "_data": "bfloat16"}
    kinds = {
        "m.a": ("IntxUnpackedToInt8Tensor", {"block_size": [1, 64], "dtype": dtype}, ["qdata", "scale", "zero_point"]),
        "m.b": ("Int8Tensor", {"block_size": [1, COLS], "dtype": dtype}, ["qdata", "scale", "zero_point"]),
        "m.c": ("Float8Tensor", {"block_size": [1, COLS], "dtype": dtype}, ["qdata", "scale"]),
    }
    metadata = {
        name: json.dumps({"_type": kind, "_data": data, "_tensor_data_names": parts})
        for name, (kind, data, parts) in kinds.items()
    }
    metadata |= {"norm.weight": json.dumps({"_type": "Tensor"}), "tensor_names": json.dumps([*kinds, "norm.weight"])}
    write(folder, tensors, {"quant_method": "torchao", "quant_type": {}}, {"format": "pt", **metadata})
    wide = scales.float().repeat_interleave(64, 1)
    return {
        "m.a": ((codes.float() - zeros.float().repeat_interleave(64, 1)) * wide).bfloat16().float(),
        "m.b": codes.float() * rows,
        "m.c": floats.float() * rows,
    }


def mlx(folder: Path) -> Numbers:
    """Affine with minima (float16, 4 bits), around zero (bfloat16), 3 bits, mxfp4 for two experts, mxfp8 and nvfp4."""
    rng = np.random.default_rng(17)
    groups = {"a": (4, 64, torch.float16), "b": (4, 32, torch.bfloat16), "c": (3, 128, torch.float32)}
    tensors: dict[str, Any] = {}
    numbers: Numbers = {}
    said: dict[str, Any] = {"group_size": 64, "bits": 4}
    for name, (bits, group, dtype) in groups.items():
        codes = rng.integers(0, 2**bits, (ROWS, COLS))
        scales = torch.from_numpy(rng.uniform(0.01, 0.1, (ROWS, COLS // group))).to(dtype)
        biases = scales * -8 if name == "b" else torch.from_numpy(rng.uniform(-1, 1, (ROWS, COLS // group))).to(dtype)
        tensors |= {f"{name}.weight": torch.from_numpy(stream(codes, bits)).view(torch.uint32)}
        tensors |= {f"{name}.scales": scales, f"{name}.biases": biases}
        said |= {name: {"group_size": group, "bits": bits, "mode": "affine"}} if name != "a" else {}
        wide, low = (part.float().repeat_interleave(group, 1) for part in (scales, biases))
        numbers[f"{name}.weight"] = torch.from_numpy(codes.astype(np.float32)) * wide + low
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = rng.integers(0, 16, (2 * ROWS, COLS))
    exponents = torch.from_numpy(rng.integers(120, 130, (2, ROWS, COLS // 32)).astype(np.uint8))
    experts = "m.block_sparse_moe.switch_mlp.up_proj"
    tensors[f"{experts}.weight"] = torch.from_numpy(stream(codes, 4)).view(torch.uint32).reshape(2, ROWS, -1)
    tensors[f"{experts}.scales"] = exponents
    said[experts] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    wide = torch.exp2(exponents.float() - 127).repeat_interleave(32, 2)
    held = e2m1[torch.from_numpy(codes)].reshape(2, ROWS, COLS) * wide
    numbers |= {f"m.block_sparse_moe.experts.{expert}.w3.weight": held[expert] for expert in range(2)}
    floats = torch.from_numpy(rng.uniform(-400, 400, (ROWS, COLS)).astype(np.float32)).to(torch.float8_e4m3fn)
    tensors |= {"d.weight": floats.view(torch.uint8).view(torch.uint32), "d.scales": exponents[0].contiguous()}
    said["d"] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    numbers["d.weight"] = floats.float() * wide[0]
    small = torch.from_numpy(rng.uniform(0.1, 2, (ROWS, COLS // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    tensors |= {"e.weight": torch.from_numpy(stream(codes[:ROWS], 4)).view(torch.uint32)}
    tensors |= {"e.scales": small.view(torch.uint8)}
    said["e"] = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    numbers["e.weight"] = e2m1[torch.from_numpy(codes[:ROWS])] * small.float().repeat_interleave(16, 1)
    write(folder, tensors, said, {"format": "mlx"}, key="quantization")
    return numbers


FOLDERS: dict[str, Callable[[Path], Numbers]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "mlx": mlx,
}
