"""Drift between two files: a checkpoint in high precision, and its packed version, tensor by tensor.

`compare_files` takes any two files and says how alike their numbers are. This module takes a master and its packed
version, compares packed tensors only, and also checks their scales and codes. Both files are read in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitplan.errors import BitplanError
from bitplan.formats import get_format
from bitplan.formats.quantization_error import Similarity, similarity
from bitplan.formats.scales.checks import scale_health
from bitplan.kernels import decode
from bitplan.store.checks.drift_log import DriftRow
from bitplan.store.files.open_files import open_tensors
from bitplan.store.files.packed_rows import PackedTensor, packed_pair, packed_tensor, scales_name
from bitplan.store.files.safetensors_tensors import NativeTensors
from bitplan.store.files.tensor_file import TensorFile

OnBytes = Callable[[int, str], None]


@dataclass(frozen=True)
class FileDrift:
    """A row per packed tensor, the largest relative error first, and findings where tensors cannot be compared."""

    rows: tuple[DriftRow, ...]
    findings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"layers": [row.to_dict() for row in self.rows], "findings": list(self.findings)}


def drift_files(master: str | Path, packed: str | Path, *, step: int = 0, on_bytes: OnBytes | None = None) -> FileDrift:
    """Compare every packed tensor of one file with the tensor of its name in another.

    gpt-oss's pairs NAME.blocks and NAME.scales (OpenAI's) are compared with NAME; NAME_blocks and NAME_scales (Hugging
    Face's) with NAME transposed, which is how transformers holds experts in floats.
    """
    rows: list[DriftRow] = []
    findings: list[str] = []
    with open_tensors(master) as one, open_tensors(packed) as two:
        for tensor, name, transposed in _packed(two, findings):
            spec = one.specs.get(one.tied.get(name, name))
            shape = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) if transposed else tensor.shape
            if spec is None:
                findings.append(f"{tensor.name}: in {packed}, but {name!r} is not in {master}")
            elif spec.shape != shape:
                findings.append(f"{tensor.name}: {name!r} must be {shape} in {master}, got {spec.shape}")
            elif not spec.dtype.is_floating_point:
                findings.append(f"{tensor.name}: {name!r} must be floats in {master}, got {spec.format}")
            else:
                rows.append(_drift(_Master(one, spec.name, tensor.steps, transposed), tensor, name, step, on_bytes))
                if not math.isfinite(rows[-1].max_abs_error):
                    findings.append(f"{name}: NaN or infinity on one side, so its figures say nothing")
    if not rows and not findings:
        findings.append(f"{packed}: no packed tensor; `bitplan compare` takes any two files")
    rows.sort(key=lambda row: (-row.badness, row.name))
    return FileDrift(tuple(rows), tuple(findings))


def _drift(master: _Master, tensor: PackedTensor, name: str, step: int, on_bytes: OnBytes | None) -> DriftRow:
    sums, health = Similarity(), None
    for start, stop in tensor.spans():
        encoded = tensor.read(start, stop)
        sums += similarity(master.read(start, stop), decode(encoded))
        own = scale_health(encoded)
        health = own if health is None else health + own
        if on_bytes:
            on_bytes((stop - start) * tensor.nbytes // tensor.steps, name)
    assert health is not None
    return DriftRow.of(step, name, sums, health, tensor.nbytes)


class _Master:
    """A master tensor, read in the steps of its packed version: by rows if the file allows it, else whole."""

    def __init__(self, file: TensorFile, name: str, steps: int, transposed: bool) -> None:
        spec = file.spec(name)
        self._file, self._name, self._steps, self._transposed = file, name, steps, transposed
        self._by_rows = isinstance(file, NativeTensors) and not spec.encoded and spec.shape[:1] == (steps,)
        self._whole: Tensor | None = None

    def read(self, start: int, stop: int) -> Tensor:
        if self._by_rows:
            assert isinstance(self._file, NativeTensors)
            return self._turned(self._file._checkpoint.read_rows(self._name, start, stop))
        if self._whole is None:
            self._whole = self._turned(self._file.read_float(self._name)).reshape(self._steps, -1)
        return self._whole[start:stop]

    def _turned(self, numbers: Tensor) -> Tensor:
        return numbers.mT if self._transposed else numbers


def _packed(file: TensorFile, findings: list[str]) -> Iterator[tuple[PackedTensor, str, bool]]:
    """Every packed tensor that is not empty, the name of its master, and whether the master is transposed."""
    for name, spec in file.specs.items():
        if not math.prod(spec.shape):
            continue
        if spec.encoded:
            yield packed_tensor(file, name), name, False
        elif spec.format == "uint8" and name.endswith(("_blocks", ".blocks")):
            scales = scales_name(name)
            if scales in file.specs:
                try:
                    pair = packed_pair(file, name, scales, get_format("mxfp4"))
                except BitplanError as error:
                    findings.append(str(error))
                    continue
                yield pair, name[: -len("_blocks")], name.endswith("_blocks")
