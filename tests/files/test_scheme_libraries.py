"""Folders that the libraries themselves wrote, where they are installed: their own decoding gives our numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bitplan import open_tensors
from bitplan.formats import Encoded
from tests.files.quantized_folders import write

AUTO_ROUND = Path(__file__).parent / "auto_round_folders"


def check(folder: Path, expected: dict[str, torch.Tensor], *, exact: bool = True) -> None:
    """Packed weights are products in float32; the libraries round them to the type of the result."""
    with open_tensors(folder) as file:
        assert {name for name in file.specs if name != "norm.weight"} == set(expected)
        for name, numbers in expected.items():
            assert file.spec(name).shape == tuple(numbers.shape)
            ours = file.read_float(name).to(numbers.dtype)
            if exact or not isinstance(file.read(name), Encoded):
                assert torch.equal(ours, numbers), name
            else:
                torch.testing.assert_close(ours, numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compressed_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "g32": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        "zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        "three": ("pack-quantized", {"num_bits": 3, "strategy": "channel"}),
        "eight": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 128}),
        "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        "tensor": ("naive-quantized", {"num_bits": 8, "strategy": "tensor"}),
        "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    }
    tensors, expected, groups = {}, {}, {}
    for name, (container, options) in kinds.items():
        args = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=[name], weights=args)
        weight = torch.randn(16, 256, dtype=dtype)
        width = {"group": args.group_size, "channel": 256, "tensor": None}[options["strategy"]]
        blocks = weight.reshape(16, -1, width) if width else weight.reshape(1, 1, -1)
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        if width is None:
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.load_from_registry(container)
        packed = compressor.compress(state, scheme)
        expected[f"{name}.weight"] = compressor.decompress(packed, scheme)["weight"]
        tensors |= {f"{name}.{part}": one for part, one in packed.items()}
        groups[name] = {"targets": [name], "weights": args.model_dump(mode="json"), "format": container}
    write(
        tmp_path,
        tensors,
        {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups},
    )
    check(tmp_path, expected)


def test_small_floats_of_compressed_tensors(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    torch.manual_seed(0)
    mx = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, **mx}),
        "mxfp8_e4m3": ("mxfp8-quantized", {"num_bits": 8, **mx}),
        "nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            | {"scale_dtype": torch.float8_e4m3fn},
        ),
        "fp8_e4m3_b128": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        ),
    }
    tensors, expected, groups = {}, {}, {}
    for name, (container, options) in kinds.items():
        args = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=[name], weights=args)
        weight = torch.randn(128, 256, dtype=torch.bfloat16)
        width = args.group_size
        blocks = weight.reshape(128, -1, width) if width else weight.reshape(1, 128, 2, 128).transpose(1, 2).flatten(2)
        base = {"weight_global_scale": generate_gparam(*weight.float().aminmax())} if name == "nvfp4" else {}
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, *base.values())
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, **base}
        compressor = BaseCompressor.load_from_registry(container)
        packed = compressor.compress(state, scheme)
        expected[f"{name}.weight"] = compressor.decompress(packed, scheme)["weight"]
        tensors |= {f"{name}.{part}": one for part, one in packed.items()}
        groups[name] = {"targets": [name], "weights": args.model_dump(mode="json"), "format": container}
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    write(tmp_path, tensors, said)
    with open_tensors(tmp_path) as file:
        assert {name: file.spec(f"{name}.weight").format for name in kinds} == {name: name for name in kinds}
        for name in kinds:
            ours, theirs = file.read_float(f"{name}.weight"), expected[f"{name}.weight"]
            # The library divides by nvfp4's factor where we multiply by its reciprocal: the last bit may differ.
            torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=2**-7 if name == "nvfp4" else 0, atol=0)


KEPT = {"gptq_int4": "q4_0_gguf", "gptq_int8": "q8_0_gguf"}  # the other folders come decoded


@pytest.mark.parametrize("folder", sorted(AUTO_ROUND.glob("*_*int*/")), ids=lambda folder: folder.name)
def test_gptq_and_awq_of_auto_round(folder: Path) -> None:
    """Files of the library itself, made by auto_round_folders/make.py, with what its own layers computed from them."""
    ((name, numbers),) = load_file(folder.with_suffix(".safetensors")).items()
    with open_tensors(folder) as file:
        assert file.spec(name).encoded == (folder.name in KEPT)
        assert not file.spec(name).encoded or file.spec(name).format == KEPT[folder.name]
        assert torch.equal(file.read_float(name).half(), numbers)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(tmp_path: Path, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(24, 100).bfloat16()
    tensors, expected = {}, {}
    for name in ("nf4", "fp4"):
        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=name)
        tensors |= {f"{name}.weight.{part}": one for part, one in state.as_dict(packed=True).items()}
        tensors[f"{name}.weight"] = codes
        expected[f"{name}.weight"] = functional.dequantize_4bit(codes, state)
    write(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    check(tmp_path, expected)


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0)).half()
    codes, tops, _ = functional.int8_vectorwise_quant(weight)
    write(tmp_path, {"a.weight": codes, "a.SCB": tops}, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    theirs = functional.int8_vectorwise_dequant(codes, tops).float()
    with open_tensors(tmp_path) as file:
        assert file.spec("a.weight").format == "int8_row"
        torch.testing.assert_close(file.read_float("a.weight").float(), theirs, rtol=1e-6, atol=0)


def test_torchao(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup

    torch.manual_seed(0)
    configs = {
        "int8": Int8WeightOnlyConfig(version=2),
        "fp8": Float8WeightOnlyConfig(),
        "intx": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)),
    }
    state = {}
    for name, config in configs.items():
        layer = nn.Sequential(nn.Linear(256, 16, bias=False, dtype=torch.bfloat16))
        quantize_(layer, config)
        state[f"{name}.weight"] = layer[0].weight.data
    weight = torch.randn(16, 256, dtype=torch.bfloat16)
    state["mxfp8.weight"] = MXTensor.to_mx(weight, torch.float8_e4m3fn, 32)
    state["mxfp4.weight"] = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    state["nvfp4.weight"] = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=torch.tensor(0.001))
    state["blocks.weight"] = NVFP4Tensor.to_nvfp4(weight)
    tensors, metadata = flatten_tensor_state_dict(state)
    write(tmp_path, tensors, {"quant_method": "torchao"}, {"format": "pt", **metadata})
    check(tmp_path, {name: one.dequantize() for name, one in state.items()}, exact=False)
    with open_tensors(tmp_path) as file:
        formats = {name.removesuffix(".weight"): file.spec(name).format for name in state}
    assert formats == {
        "int8": "int8_row",
        "fp8": "fp8_e4m3_row",
        "intx": "int4_g64",
        "mxfp8": "mxfp8_e4m3",
        "mxfp4": "mxfp4",
        "nvfp4": "nvfp4",
        "blocks": "nvfp4",
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_mlx(tmp_path: Path, dtype: str) -> None:
    """Every mode of MLX's own quantizer; without metadata it writes null there."""
    mx = pytest.importorskip("mlx.core")
    modes = [("affine", bits, group) for bits, group in ((2, 64), (3, 32), (4, 64), (5, 32), (6, 128), (8, 64))]
    said: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    tensors, expected = {}, {}
    for mode, bits, group in [*modes, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]:
        name, how = f"{mode}{bits}", {"group_size": group, "bits": bits, "mode": mode}
        weight = mx.random.normal((16, 256), key=mx.random.key(bits)).astype(getattr(mx, dtype))
        parts = mx.quantize(weight, **how)
        tensors |= {f"{name}.{part}": one for part, one in zip(("weight", "scales", "biases"), parts, strict=False)}
        said[name] = how
        wide = [parts[0], *(one.astype(mx.float32) for one in parts[1:])] if mode == "affine" else parts
        expected[f"{name}.weight"] = torch.from_numpy(np.array(mx.dequantize(*wide, **how, dtype=mx.float32)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization": said, "quantization_config": said}))
    check(tmp_path, expected)
