"""transformers' gpt-oss model around packed experts.

The model is built on the meta device, where it takes no memory: its experts would be four times the file in bfloat16.
Their modules are then replaced, and every other parameter is assigned, not copied. transformers is an optional
dependency, imported when a model is asked for.

Every tensor is allocated once, where it stays, and filled from chunks of at most 64 MiB. Packed experts are moved as
bytes: those of the safetensors layouts unchanged, those of GGUF into gpt-oss's order, on the device and one expert at a
time. Names are Hugging Face's, which are those of transformers' model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import FileFormatError, FormatError, StoreError
from bitplan.formats import Encoded, repack
from bitplan.formats.scales.rules import E8M0_NAN
from bitplan.plan.names import listed, natural_order
from bitplan.runtime.packed.quant_experts import QuantExperts
from bitplan.runtime.packed.read_packed import check_held, refuse_not_finite
from bitplan.runtime.packed_weight import PackedWeight
from bitplan.store.gpt_oss import GptOssFile
from bitplan.store.gpt_oss.config import hf_config
from bitplan.store.gpt_oss.experts import MXFP4, MXFP4_GGUF, group_experts
from bitplan.store.gpt_oss.layouts import LayoutTensor, list_slots
from bitplan.store.models.transformers_names import foreign_reason

EXPERTS = ".mlp.experts."
GENERATION = "generation_config.json"


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
    from transformers import GenerationConfig, GptOssConfig, GptOssForCausalLM

    document = dict(file.config or hf_config(file.shape, file.settings, packed=True))
    document.pop("quantization_config", None)  # bitplan loads the weights, not a quantizer of transformers
    try:
        config = GptOssConfig.from_dict(document | {"dtype": dtype})
        with torch.device("meta"):
            model: nn.Module = GptOssForCausalLM(config)
    except Exception as error:  # transformers raises any kind of error on a bad config
        raise FileFormatError(f"{file.where}: no model can be made of its config: {foreign_reason(error)}") from error
    if file.layout == "hf" and (file.folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(file.folder)
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


def experts_of(model: nn.Module, layer: int) -> nn.Module:
    return model.get_submodule(f"model.layers.{layer}.mlp.experts")


def fill_model(
    model: nn.Module, plain: Mapping[str, Tensor], experts: Mapping[int, QuantExperts], device: torch.device
) -> None:
    """Put everything in its place, and leave nothing on meta."""
    for layer, module in experts.items():
        model.set_submodule(f"model.layers.{layer}.mlp.experts", module)
    missing, unknown = model.load_state_dict(plain, strict=False, assign=True)
    assert not unknown
    assert all(EXPERTS in name for name in missing)
    inner: Any = model.get_submodule("model")
    if any(buffer.is_meta for buffer in inner.rotary_emb.buffers()):  # computed, and in no file
        inner.rotary_emb = type(inner.rotary_emb)(config=inner.config)
    inner.rotary_emb.to(device)
    model.train(False)


def check_packed_experts(model: nn.Module, where: str) -> None:
    """Raise if an expert's matrix became floats."""
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            dtypes = [part.dtype for part in (*module.gate_up.buffers(), *module.down.buffers())]
            if any(dtype != torch.uint8 for dtype in dtypes) or not isinstance(module.down, PackedWeight):
                raise StoreError(f"{where}: {name!r} did not stay packed: its parts are {dtypes}")
        elif type(module).__name__ == "GptOssExperts":
            raise StoreError(f"{where}: {name!r} was not replaced, and would hold its experts as floats")


NORMS = {"attn_norm", "mlp_norm", "final_norm"}
GGUF_BLOCK_BYTES = 17  # the scale, then 32 nibbles


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
    out = torch.empty(slot.shape, dtype=dtype, device=device)
    twin, at = file.twin(slot), 0
    for index, part in enumerate(slot.parts if twin is None else ("whole",)):
        for rows in file.rows(part, slot.layer) if twin is None else file.raw(twin):
            if not round_to:
                check_held(file.where, slot.name, rows, dtype, "the type of the embedding")
            if set(slot.parts) <= NORMS:
                refuse_not_finite(file.where, slot.name, rows, "numbers of a norm")
            is_woven = slot.kind == "woven" and twin is None
            target = out[:, index :: len(slot.parts)] if is_woven else out[at : at + rows.shape[0]]
            target.copy_(rows)
            at += rows.shape[0]
    return out


def _check_scales(file: GptOssFile, slot: LayoutTensor, rows: Tensor, first: int) -> None:
    """Refuse scales of byte 255, which is NaN in E8M0. Scales are a sixteenth of the codes, so this costs little."""
    bad = (rows == E8M0_NAN).flatten(1).sum(dim=1)
    if bad.any():
        expert = first + int(bad.ne(0).int().argmax())
        raise FileFormatError(
            f"{file.where}: {slot.name!r}, expert {expert}: a scale byte 255, which is NaN; "
            "convert or download the file again"
        )


def load_experts(file: GptOssFile, layer: int, parts: tuple[str, ...], device: torch.device) -> Encoded:
    """The matrices of a layer's experts [experts, outputs, inputs], gate and up alternating by rows, in mxfp4."""
    shape = (file.shape.experts, *file.shape.matrix(parts))
    made = {
        part: torch.empty(size, dtype=dtype, device=device) for part, (dtype, size) in MXFP4.part_shapes(shape).items()
    }
    for slot in group_experts(file.slots)[layer, parts]:
        at = 0
        for rows in file.raw(slot):
            if slot.kind == "matrix":
                every = slice(parts.index(slot.parts[0]), None, len(parts))
                for index, blocks in enumerate(rows.to(device), start=at):
                    ordered = _in_our_order(file, slot, index, blocks)
                    for part, own in ordered.parts.items():
                        made[part][index, every].copy_(own)
            else:
                if slot.kind == "scales":
                    _check_scales(file, slot, rows, at)
                target = made["data" if slot.kind == "blocks" else "scales"][at : at + rows.shape[0]]
                target.copy_(rows.reshape(target.shape))
            at += rows.shape[0]
    return Encoded(MXFP4, shape, **made)


def _in_our_order(file: GptOssFile, slot: LayoutTensor, index: int, raw: Tensor) -> Encoded:
    """One expert's rows of GGUF blocks, each a scale and 16 bytes, with the nibbles as gpt-oss has them."""
    blocks = raw.unflatten(-1, (-1, GGUF_BLOCK_BYTES))
    packed = Encoded(MXFP4_GGUF, slot.shape[1:], blocks[..., 1:].flatten(-2), blocks[..., 0])
    try:
        return repack(packed, MXFP4)
    except FormatError as error:
        raise FileFormatError(f"{file.where}: {slot.name!r}, expert {index}: {error}") from None
