"""A container of somebody else's: a miniature of MLX's layout, which every verb on files then reads and writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from bitplan import encode, get_format, open_tensors, quantize_file
from bitplan.base.errors import StoreError
from bitplan.base.folders import atomic_folder
from bitplan.cli import run
from bitplan.files import Container, TensorFile, morph_model, open_files, register_container
from bitplan.files.models.save_load import load_model, write_model
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded

FMT = get_format("int4_g32")
QUANTIZATION = {"group_size": 32, "bits": 4}


class MlxFolder(TensorFile):
    """config.json and model.safetensors; a packed weight is NAME.weight (eight codes to a uint32), .scales, .biases."""

    kind = "mlx"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = safetensors.torch.load_file(path / "model.safetensors")
        self.specs = {name: self._spec(name) for name in self._tensors if not name.endswith((".scales", ".biases"))}

    @property
    def files(self) -> list[Path]:
        return [self.path / "config.json", self.path / "model.safetensors"]

    def _spec(self, name: str) -> TensorSpec:
        found = self.read(name)
        if isinstance(found, Encoded):
            return TensorSpec(name, found.shape, "float32", format=FMT.name, nbytes=found.nbytes, encoded=True)
        kind = str(found.dtype).removeprefix("torch.")
        return TensorSpec(name, tuple(found.shape), kind, format=kind, nbytes=found.nbytes)

    def read(self, name: str) -> Tensor | Encoded:
        codes, scales = self._tensors[name], self._tensors.get(name.removesuffix("weight") + "scales")
        if scales is None or not name.endswith(".weight"):
            return codes
        return Encoded(FMT, (codes.shape[0], 8 * codes.shape[1]), codes.view(torch.uint8), scales)

    def close(self) -> None:
        self._tensors = {}


class MlxWriter:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def write(self, name: str, item: Tensor | Encoded) -> None:
        if isinstance(item, Encoded):
            layer = name.removesuffix("weight")
            self.tensors[f"{layer}scales"], self.tensors[f"{layer}biases"] = item.scales, -8 * item.scales
            item = item.data.view(torch.uint32)
        self.tensors[name] = item


class Mlx(Container):
    suffix = ".mlx"
    file_type = MlxFolder
    is_folder = True

    def recognises(self, path: Path, head: bytes) -> bool:
        config = path / "config.json"
        return config.is_file() and json.loads(config.read_text()).get("quantization") == QUANTIZATION

    @contextmanager
    def write(
        self, path: Path, promises: Sequence[TensorSpec], metadata: Mapping[str, Any], tied: Mapping[str, str]
    ) -> Iterator[MlxWriter]:
        for promise in promises:
            if promise.fmt not in (None, FMT):
                raise StoreError(f"{path}: MLX's layout cannot hold {promise.fmt.name} ({promise.name!r})")
        writer = MlxWriter()
        yield writer
        with atomic_folder(path) as folder:
            (folder / "config.json").write_text(json.dumps({"quantization": QUANTIZATION}))
            safetensors.torch.save_file(writer.tensors, folder / "model.safetensors")


@pytest.fixture(autouse=True)
def mlx(monkeypatch):
    monkeypatch.setattr(open_files, "CONTAINERS", [*open_files.CONTAINERS])
    register_container(Mlx())


@pytest.fixture
def source(tmp_path):
    tensors = {
        "up.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(0)),
        "norm.weight": torch.ones(64),
    }
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_a_file_is_quantized_into_it_inspected_and_compared(source, tmp_path, capsys):
    out = tmp_path / "out.mlx"
    assert run(["quantize", str(source), str(out), "--format", "int4_g32"]) == 0
    stored = safetensors.torch.load_file(out / "model.safetensors")
    assert {name: (item.dtype, tuple(item.shape)) for name, item in stored.items()} == {
        "up.weight": (torch.uint32, (32, 8)),
        "up.scales": (torch.bfloat16, (32, 2)),
        "up.biases": (torch.bfloat16, (32, 2)),
        "norm.weight": (torch.float32, (64,)),
    }
    capsys.readouterr()
    assert run(["inspect", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["kind"] == "mlx"
    assert {row["name"]: row["format"] for row in shown["tensors"]} == {"up.weight": FMT.name, "norm.weight": "float32"}
    assert run(["compare", str(source), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worst"] == "up.weight"
    with open_tensors(out) as file:
        weight = safetensors.torch.load_file(source)["up.weight"]
        assert file.read("up.weight").to_bytes() == encode(weight, FMT).to_bytes()
    quantize_file(out, tmp_path / "back.safetensors", {"up": "int8_row"})
    assert run(["quantize", str(source), str(out), "--format", "int4_g32", "--force"]) == 2, "folders stay"
    with pytest.raises(StoreError, match=r"other.mlx: MLX's layout cannot hold mxfp4 \('up.weight'\)"):
        quantize_file(source, tmp_path / "other.mlx", "mxfp4", only=["up"])


def test_a_model_is_saved_and_loaded(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False))
    morph_model(model, FMT)
    write_model(model, tmp_path / "model.mlx")
    again = load_model(tmp_path / "model.mlx", torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False)))
    assert torch.equal(again.eval()(torch.ones(1, 64)), model.eval()(torch.ones(1, 64)))


def test_what_is_no_container_of_its_own_is_refused():
    with pytest.raises(StoreError, match=r"suffix begins with a dot and is its own, got '.mlx'"):
        register_container(Mlx())
    with pytest.raises(StoreError, match="takes a Container, got a str"):
        register_container("mlx")
