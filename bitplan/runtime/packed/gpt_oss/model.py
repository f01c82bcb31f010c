"""transformers' gpt-oss model around packed experts.

The model is built on the meta device, where it takes no memory: its experts would be four times the file in bfloat16.
Their modules are then replaced, and every other parameter is assigned, not copied. transformers is an optional
dependency, imported when a model is asked for.

Every tensor is allocated once, where it stays, and filled from chunks of at most 64 MiB, packed experts one by one.
Those are moved as bytes: from the safetensors layouts unchanged, from GGUF into gpt-oss's order, on the device. Names
are Hugging Face's, which are those of transformers' model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import FileFormatError, FormatError
from bitplan.formats import Encoded
from bitplan.formats.scales.rules import E8M0_NAN
from bitplan.plan.names import listed, natural_order
from bitplan.runtime.packed.quant_experts import QuantExperts
from bitplan.runtime.packed.read_packed import check_held, refuse_not_finite
from bitplan.store.gpt_oss import GptOssFile
from bitplan.store.gpt_oss.config import check_settings_held, hf_config
from bitplan.store.gpt_oss.experts import MXFP4
from bitplan.store.gpt_oss.layouts import LayoutTensor, list_slots
from bitplan.store.gpt_oss.source import plain_rows
from bitplan.store.models.transformers_names import foreign_faults, read_generation_config


class GptOssPackedExperts(QuantExperts):
    """QuantExperts with the signature of transformers' GptOssExperts."""

    # transformers has these experts under other names, transposed; `save_model` gives this reason.
    why_not_saved = (
        "holds packed experts of gpt-oss, which save_model does not write; save_packed writes the whole model to a "
        "folder, and `bitplan convert` brings a checkpoint into another layout"
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
