"""transformers' gpt-oss model around packed experts.

The model is built on the meta device, where it takes no memory: its experts would be four times the file in bfloat16.
Their modules are then replaced, and every other parameter is assigned, not copied. transformers is an optional
dependency, imported when a model is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import FileFormatError, StoreError
from bitplan.plan.names import listed, natural_order
from bitplan.runtime.packed.quant_experts import QuantExperts
from bitplan.runtime.packed_weight import PackedWeight
from bitplan.store.gpt_oss import GptOssFile
from bitplan.store.gpt_oss.config import hf_config
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


def check_filled(model: nn.Module, where: str) -> None:
    """Raise if a tensor was left on meta, or an expert's matrix became floats."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise StoreError(f"{where}: {name!r} was not loaded: it is still on the meta device")
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            dtypes = [part.dtype for part in (*module.gate_up.buffers(), *module.down.buffers())]
            if any(dtype != torch.uint8 for dtype in dtypes) or not isinstance(module.down, PackedWeight):
                raise StoreError(f"{where}: {name!r} did not stay packed: its parts are {dtypes}")
        elif type(module).__name__ == "GptOssExperts":
            raise StoreError(f"{where}: {name!r} was not replaced, and would hold its experts as floats")
