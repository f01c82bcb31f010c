"""Reads a gpt-oss checkpoint for `load_packed`: its headers are checked, its tensors read, its experts stay packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import FileFormatError
from bitplan.plan import Finding, Header, Manifest, check_headers, require_clean
from bitplan.plan.check_manifest import CAST, OTHER_MODEL
from bitplan.records import on_failure, read_json
from bitplan.runtime.packed.gpt_oss.model import GptOssPackedExperts, load_experts, load_plain, plain_slots
from bitplan.runtime.packed.quant_experts import QuantExperts
from bitplan.runtime.packed.read_packed import ManifestLike, as_manifest, list_headers, refuse_bad_numbers
from bitplan.runtime.packed_weight import PackedWeight
from bitplan.store.files.gguf_tensors import GGUFTensors
from bitplan.store.files.open_files import open_tensors
from bitplan.store.files.tensor_file import TensorFile
from bitplan.store.gpt_oss import GptOssFile
from bitplan.store.gpt_oss.config import ARCHITECTURE
from bitplan.store.gpt_oss.experts import DOWN, GATE_UP
from bitplan.store.gpt_oss.layouts import GGUF_WIDE, list_slots
from bitplan.store.packed_folder import QUANT_METHOD

CONFIG = "config.json"
EXPERTS = ("gate_up_proj", "down_proj")
PACKED_EXPERTS = (".mlp1_weight.blocks", ".experts.gate_up_proj_blocks")
FLOAT_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # Hugging Face's names of plain experts


def is_gpt_oss(path: Path) -> bool:
    """Whether a file or folder is a gpt-oss checkpoint in one of its own layouts, not in that of `bitplan quantize`."""
    if path.is_dir() and (path / CONFIG).is_file():
        config = read_json(path / CONFIG)
        said = isinstance(config, dict) and config.get("quantization_config")
        is_ours = isinstance(said, dict) and said.get("quant_method") == QUANT_METHOD
        if not isinstance(config, dict) or is_ours:
            return False
        if config.get("model_type") is not None:
            return bool(config["model_type"] == "gpt_oss")
    with open_tensors(path) as file:
        if isinstance(file, GGUFTensors):
            kind = file.file.metadata.get("general.architecture")
            return kind is not None and kind.value == ARCHITECTURE
        return any(name.endswith(PACKED_EXPERTS + FLOAT_EXPERTS) for name in file.specs)


def read_values(
    file: GptOssFile, device: torch.device, dtype: torch.dtype, *, may_round: bool
) -> dict[str, Tensor | PackedWeight]:
    """Every tensor of the model by Hugging Face's name, on the device: the experts packed, all others in `dtype`."""
    values: dict[str, Tensor | PackedWeight] = {}
    with on_failure(values.clear):  # the traceback keeps this frame, and would keep the memory
        for layer in range(file.shape.layers):
            for parts, local in zip((GATE_UP, DOWN), EXPERTS, strict=True):
                values[f"{_owner(layer)}.{local}"] = PackedWeight(load_experts(file, layer, parts, device))
        for slot in plain_slots(file):
            values[slot.name] = load_plain(file, slot, device, dtype, round_to=may_round)
        return values


def make_experts(
    model: nn.Module,
    layers: int,
    values: Mapping[str, Tensor | PackedWeight],
    parameters: Mapping[str, nn.Parameter],
    **options: Any,
) -> dict[str, QuantExperts]:
    """The packed experts of every layer, by the name of what they replace."""
    made: dict[str, QuantExperts] = {}
    for owner in map(_owner, range(layers)):
        replaced: Any = model.get_submodule(owner)
        weights: Any = [values[f"{owner}.{local}"] for local in EXPERTS]
        gate_up_bias, down_bias = (parameters[f"{owner}.{local}_bias"] for local in EXPERTS)
        made[owner] = GptOssPackedExperts(
            *weights,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            alpha=float(replaced.alpha),
            limit=float(replaced.limit),
            name=owner,
            **options,
        )
    return made


def _owner(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


# ---- before anything is read -----------------------------------------------------------------------------------------


def open_checked(path: Path, manifest: ManifestLike, *, deep: bool) -> GptOssFile:
    """The open file, after its headers were checked against the manifest."""
    rules = as_manifest(manifest)
    with open_tensors(path) as headers:
        is_gguf = isinstance(headers, GGUFTensors)
        if not is_gguf:
            _refuse_floats(headers)
            require_clean(rules, list_headers(headers), checkpoint=str(path))
        if deep:
            refuse_bad_numbers(headers, rules)
    file = GptOssFile(path)
    with on_failure(file.close):
        if file.experts is not None:
            raise _floats(path, file.expert_name(0, GATE_UP), file.experts)
        if is_gguf:
            require_clean(rules, _translated(file), checkpoint=str(path))
    return file


def gpt_oss_findings(
    path: Path, rules: Manifest, headers: dict[str, Header]
) -> tuple[dict[str, Header], list[Finding]]:
    """What `load_packed` would refuse: by the manifest, then by what a gpt-oss checkpoint and its config must be.

    The headers come back under the names that the manifest knows, which are not GGUF's.
    """
    structure: list[Finding] = []
    try:
        with GptOssFile(path) as file:
            if file.layout == "gguf":
                headers = _translated(file)
            if file.experts is not None:
                raise _floats(path, file.expert_name(0, GATE_UP), file.experts)
    except FileFormatError as error:
        structure = [Finding("gpt-oss", path.name, str(error))]
    findings = check_headers(rules, headers)
    if structure and all(finding.code in (CAST, OTHER_MODEL) for finding in findings):
        findings = structure
    return headers, findings


def _refuse_floats(headers: TensorFile) -> None:
    """Refuse experts as floats before the manifest, which knows packed experts only, asks for a rule for them."""
    for name, spec in headers.specs.items():
        if name.endswith(FLOAT_EXPERTS) and spec.dtype.is_floating_point:
            raise _floats(headers.path, name, spec.dtype)


def _floats(path: Path, name: str, dtype: torch.dtype) -> FileFormatError:
    return FileFormatError(
        f"{path}: {name!r} is {dtype}: these experts are not packed, and are not loaded as floats; "
        "pack them with `bitplan convert` first"
    )


def _translated(file: GptOssFile) -> dict[str, Header]:
    """A GGUF file's headers under Hugging Face's names; tensors that GGUF stores wider count as bfloat16."""
    headers = {}
    for slot in list_slots("hf", file.shape):
        count = torch.Size(slot.shape).numel()
        if slot.is_expert:
            headers[slot.name] = Header("uint8", slot.shape, count)
            continue
        dtypes = {file.dtype(part, slot.layer) for part in slot.parts}
        is_wide = dtypes == {torch.float32} and set(slot.parts) <= GGUF_WIDE
        dtype = torch.bfloat16 if is_wide else dtypes.pop()
        headers[slot.name] = Header(str(dtype).removeprefix("torch."), slot.shape, count * dtype.itemsize)
    return headers


def needed_bytes(file: GptOssFile, dtype: torch.dtype) -> int:
    """The bytes that the model will take: experts as they are, all others in `dtype`."""
    plain = sum(torch.Size(slot.shape).numel() * dtype.itemsize for slot in plain_slots(file))
    return plain + sum(file.tensors[slot.name].nbytes for slot in file.slots if slot.is_expert)
