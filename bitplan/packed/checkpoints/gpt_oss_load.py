"""Reads a gpt-oss checkpoint for `load_packed`: its headers are checked, its tensors read, its experts stay packed.

transformers' gpt-oss model around packed experts.

The model is built on the meta device, where it takes no memory: its experts would be four times the file in bfloat16.
Their modules are then replaced, and every other parameter is assigned, not copied. transformers is an optional
dependency, imported when a model is asked for.

Every tensor is allocated once, where it stays, and filled from chunks of at most 64 MiB, packed experts one by one.
Those are moved as bytes: from the safetensors layouts unchanged, from GGUF into gpt-oss's order, on the device. Names
are Hugging Face's, which are those of transformers' model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.errors import FileFormatError, FormatError
from bitplan.base.records import on_failure, read_json
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.gpt_oss import GptOssFile
from bitplan.files.gpt_oss.config import ARCHITECTURE, check_settings_held, hf_config
from bitplan.files.gpt_oss.experts import DOWN, GATE_UP, MXFP4
from bitplan.files.gpt_oss.layouts import GGUF_WIDE, LayoutTensor, list_slots
from bitplan.files.gpt_oss.source import plain_rows
from bitplan.files.models.transformers_names import foreign_faults, read_generation_config
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import QUANT_METHOD
from bitplan.files.tensor_file import TensorFile
from bitplan.formats import Encoded
from bitplan.formats.scale_rules import E8M0_NAN
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.read_tensors import (
    ManifestLike,
    as_manifest,
    check_held,
    list_headers,
    refuse_bad_numbers,
    refuse_not_finite,
)
from bitplan.plan import Finding, Header, Manifest, check_headers, require_clean
from bitplan.plan.check_manifest import CAST, OTHER_MODEL
from bitplan.plan.names import listed, natural_order

# ---- gpt oss model ---------------------------------------------------------------------------------------------------


class GptOssPackedExperts(QuantExperts):
    """QuantExperts with the signature of transformers' GptOssExperts."""

    # transformers has these experts under other names, transposed; `save_model` gives this reason.
    why_not_saved = (
        "holds packed experts of gpt-oss, which save_model does not write; save_packed writes the whole model to a "
        "folder, and `bitplan gpt-oss convert` brings a checkpoint into another layout"
    )

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, router_indices, routing_weights)


def empty_model(file: GptOssFile, dtype: torch.dtype) -> nn.Module:
    """The model for a file's sizes and settings, without memory behind its parameters."""
    from transformers import GptOssConfig, GptOssForCausalLM

    if file.config is None:
        check_settings_held(file.where, file.settings, "hf")
    document = dict(file.config or hf_config(file.shape, file.settings, packed=True))
    document.pop("quantization_config", None)  # bitplan loads the weights, not a quantizer of transformers
    with foreign_faults(FileFormatError, f"{file.where}: no model can be made of its config"):
        config = GptOssConfig.from_dict(document | {"dtype": dtype})
        with torch.device("meta"):
            model: nn.Module = GptOssForCausalLM(config)
    if file.layout == "hf":
        read_generation_config(model, file.folder)
    return model


def check_fits(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """The model must have the tensors of the file, no more and no others."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = natural_order({name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name)})
    if wrong:
        name = wrong[0]
        sizes = [str(sizes_of[name]) if name in sizes_of else "missing" for sizes_of in (shapes, own)]
        more = f"; so do {len(wrong) - 1} others: {listed(wrong[1:], 3)}" if len(wrong) > 1 else ""
        raise FileFormatError(
            f"{where}: does not fit this {type(model).__name__}: {name!r} differs: {sizes[0]} in the file, "
            f"{sizes[1]} in the model{more}"
        )


def fill_computed(model: nn.Module, device: torch.device) -> None:
    """Put what is computed, and in no file, on the device; the model is then ready to run."""
    inner: Any = model.get_submodule("model")
    if any(buffer.is_meta for buffer in inner.rotary_emb.buffers()):
        inner.rotary_emb = type(inner.rotary_emb)(config=inner.config)
    inner.rotary_emb.to(device)
    model.train(False)


NORMS = {"attn_norm", "mlp_norm", "final_norm"}


def plain_slots(file: GptOssFile) -> list[LayoutTensor]:
    """Every tensor of the model but the experts' matrices, as transformers names and shapes them."""
    return [slot for slot in list_slots("hf", file.shape) if not slot.is_expert]


def model_shapes(file: GptOssFile) -> dict[str, tuple[int, ...]]:
    """Every tensor that transformers' model has for this file, experts as the floats it expects."""
    return {slot.name: slot.shape for slot in list_slots("hf", file.shape, packed=False)}


def load_plain(
    file: GptOssFile, slot: LayoutTensor, device: torch.device, dtype: torch.dtype, *, round_to: bool
) -> Tensor:
    """A tensor that is not an expert's matrix, in `dtype`; numbers that do not fit are an error unless `round_to`."""
    out, at = torch.empty(slot.shape, dtype=dtype, device=device), 0
    for rows in plain_rows(file, slot):
        if not round_to:
            check_held(file.where, slot.name, rows, dtype, "the type of the embedding")
        if set(slot.parts) <= NORMS:
            refuse_not_finite(file.where, slot.name, rows, "numbers of a norm")
        out[at : at + rows.shape[0]].copy_(rows)
        at += rows.shape[0]
    return out


def load_experts(file: GptOssFile, layer: int, parts: tuple[str, ...], device: torch.device) -> Encoded:
    """The matrices of a layer's experts [experts, outputs, inputs], gate and up alternating by rows, in mxfp4."""
    shape = (file.shape.experts, *file.shape.matrix(parts))
    made = {
        part: torch.empty(size, dtype=dtype, device=device) for part, (dtype, size) in MXFP4.part_shapes(shape).items()
    }
    for index in range(file.shape.experts):
        try:
            matrix = file.expert(layer, parts, index, device)
        except FormatError as error:
            raise FileFormatError(f"{file.where}: {error}") from None
        assert isinstance(matrix, Encoded)
        if bool((matrix.parts["scales"] == E8M0_NAN).any()):
            name = next(
                slot.name for slot in file.slots if (slot.kind, slot.parts, slot.layer) == ("scales", parts, layer)
            )
            raise FileFormatError(
                f"{file.where}: {name!r}, expert {index}: a scale byte 255, which is NaN; "
                "convert or download the file again"
            )
        for part, own in matrix.parts.items():
            made[part][index].copy_(own)
    return Encoded(MXFP4, shape, **made)


# ---- gpt oss load ----------------------------------------------------------------------------------------------------


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
        "pack them with `bitplan gpt-oss convert` first"
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
