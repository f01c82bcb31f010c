"""Folders that other libraries quantized: their numbers, what stays packed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bitplan import open_tensors
from bitplan.base.errors import FileFormatError
from bitplan.files.schemes.tensors import SchemeTensors
from tests.files import quantized_folders as folders

KEPT = {  # what comes in a format of ours; the rest is decoded
    "gptq": {"a.weight": "q4_0_gguf"},
    "awq": {},
    "compressed-tensors": {
        "a.weight": "int4_g32",
        "c.weight": "int8_row",
        "d.weight": "fp8_e4m3_row",
        "e.weight": "fp8_e4m3_b128",
    },
    "fp8": {"a.weight": "fp8_e4m3_b128", "b.weight": "fp8_e4m3_row"},
    "bitsandbytes": {"b.weight": "int8_row"},
    "torchao": {"m.b": "int8_row", "m.c": "fp8_e4m3_row"},
    "mlx": {
        "a.weight": "q4_1_gguf",
        "b.weight": "int4_g32",
        "d.weight": "mxfp8_e4m3",
        "e.weight": "nvfp4",
        **{f"m.block_sparse_moe.experts.{expert}.w3.weight": "mxfp4" for expert in range(2)},
    },
}


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with open_tensors(folder) as file:
        assert isinstance(file, SchemeTensors)
        assert file.spec("norm.weight").format == "float16"
        names = [name for name in file.specs if name != "norm.weight"]
        for name in names:
            assert file.read(name).shape == file.spec(name).shape
            assert isinstance(file.read(name), torch.Tensor) != file.spec(name).encoded
        kept = {name: file.spec(name).format for name in names if file.spec(name).encoded}
        return {name: file.read_float(name).float() for name in names}, kept


@pytest.mark.parametrize("scheme", folders.FOLDERS)
def test_numbers_are_those_of_the_layout(tmp_path: Path, scheme: str) -> None:
    expected = folders.FOLDERS[scheme](tmp_path)
    numbers, kept = read(tmp_path)
    assert kept == KEPT[scheme]
    assert numbers.keys() == expected.keys()
    for name, wanted in expected.items():
        assert torch.equal(numbers[name], wanted), name


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"bits": 8}, "int8_g128"),
        ({"bits": 8, "group": 32}, "q8_0_gguf"),
        ({"bits": 8, "group": 256}, "int8_row"),
        ({"bits": 4, "group": 256, "desc_act": True}, "q4_0_gguf"),
        ({"bits": 3}, None),
        ({"bits": 2, "group": 64, "v2": True}, None),
        ({"sym": False}, None),
        ({"sym": False, "v2": True, "desc_act": True, "group": 32}, None),
    ],
)
def test_gptq_in_its_variants(tmp_path: Path, options: dict[str, Any], kept: str | None) -> None:
    expected = folders.gptq(tmp_path, **options)["a.weight"]
    numbers, formats = read(tmp_path)
    assert formats.get("a.weight") == kept
    assert torch.equal(numbers["a.weight"], expected if kept else expected.half().float())


def test_gptq_whose_last_group_is_short(tmp_path: Path) -> None:
    expected = folders.gptq(tmp_path, group=192)["a.weight"]
    assert torch.equal(read(tmp_path)[0]["a.weight"], expected.half().float())


@pytest.mark.parametrize("said", [{"group_size": -1}, {"group_size": "none"}, {"dynamic": {"+:b": {"group_size": 32}}}])
def test_gptq_groups_follow_the_scales_where_the_config_is_silent(tmp_path: Path, said: dict[str, Any]) -> None:
    expected = folders.gptq(tmp_path, group=64)["a.weight"]
    change_config(tmp_path, **{"group_size": 32} | said)
    assert torch.equal(read(tmp_path)[0]["a.weight"], expected)


def test_fp8_of_another_kind_is_decoded(tmp_path: Path) -> None:
    codes = torch.linspace(-400, 400, 32 * 256).reshape(32, 256).to(torch.float8_e5m2)
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor([0.25])}
    folders.write(tmp_path, tensors, {"quant_method": "fp8", "fmt": "e5m2"})
    numbers, kept = read(tmp_path)
    assert not kept
    assert torch.equal(numbers["a.weight"], codes.float() * 0.25)


def test_exponents_as_a_type_of_their_own_stay_as_they_are(tmp_path: Path) -> None:
    codes = torch.linspace(-400, 400, 32 * 256).reshape(32, 256).to(torch.float8_e4m3fn)
    exponents = (torch.arange(32 * 8).reshape(32, 8) % 9 + 120).to(torch.uint8)
    tensors = {"a.weight": codes, "a.weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    folders.write(tmp_path, tensors, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    numbers, kept = read(tmp_path)
    assert kept == {"a.weight": "mxfp8_e4m3"}
    wide = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(numbers["a.weight"], codes.float() * wide)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization" if "quantization" in config else "quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path) | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, path, metadata=metadata)


@pytest.mark.parametrize(
    ("scheme", "config", "tensors", "says"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, {}, "format 'marlin'.*does not read"),
        ("gptq", {"bits": "four"}, {}, "bits is .*four"),
        ("gptq", {}, {"a.g_idx": torch.full((256,), 9, dtype=torch.int32)}, "g_idx must be groups from 0 to 1"),
        ("gptq", {}, {"a.qzeros": torch.zeros(2, 4, dtype=torch.int32)}, "set sym to false"),
        ("gptq", {}, {"a.scales": None}, "'a.scales' is missing"),
        ("gptq", {}, {"a.scales": torch.zeros(3, 32).half()}, "are not 256 columns"),
        ("gptq", {}, {"a.weight": torch.zeros(2, 2)}, "lies there twice"),
        ("awq", {"version": "gemv"}, {}, "layout 'gemv'"),
        ("compressed-tensors", {"format": "marlin-24"}, {}, "marlin-24"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"u": {}}}}, {}, "with a transform_config"),
        ("compressed-tensors", {}, {"a.weight_shape": torch.tensor([2**40, 2**40])}, "do not hold"),
        ("compressed-tensors", {}, {"a.weight_shape": torch.tensor([-1, 256])}, r"sizes from 1, got \[-1, 256\]"),
        ("fp8", {}, {"a.weight_scale_inv": torch.ones(7, 7)}, "fit neither rows"),
        ("bitsandbytes", {}, {"a.weight.absmax": torch.zeros(3, dtype=torch.uint8)}, "absmax.*must be uint8"),
        ("torchao", {}, {"m._b_scale": torch.ones(3, 1)}, "do not fit groups of 256"),
        ("mlx", {"a": {"group_size": 64, "bits": 7}}, {}, "7 bits and groups of 64, which bitplan does not read"),
        ("mlx", {"e": {"group_size": 16, "bits": 4, "mode": "other"}}, {}, "mode .*other"),
        ("mlx", {}, {"a.biases": None}, "'a.biases' is missing"),
        ("mlx", {"group_size": 48}, {}, "are not rows of 4 bits in groups of 48"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, scheme: str, config: dict[str, Any], tensors: dict[str, Any], says: str
) -> None:
    folders.FOLDERS[scheme](tmp_path)
    change_config(tmp_path, **config)
    change_tensors(tmp_path, tensors)
    with pytest.raises(FileFormatError, match=says) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_formats_that_a_user_cannot_take_come_decoded(tmp_path: Path) -> None:
    expected = folders.fp8(tmp_path)
    with open_tensors(tmp_path) as file:
        assert isinstance(file, SchemeTensors)
        file.decode_where(lambda fmt: "tiles" if fmt.block.rows != 1 else None)
        assert [file.spec(name).format for name in expected] == ["fp8:fp8_e4m3_b128", "fp8_e4m3_row"]
        assert torch.equal(file.read_float("a.weight"), expected["a.weight"].half())
        assert any("decoded to float16: tiles" in note for note in file.notes)
