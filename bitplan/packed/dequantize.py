"""dequantize: a packed model as a plain one again, with the numbers that its packed weights stand for.

Linear and Embedding layers are made anew. Layers that only transformers has (stacked experts, embeddings that multiply
their rows) come from a model of the same config on meta.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from bitplan.base.errors import StoreError
from bitplan.files.transformers_names import silence_transformers
from bitplan.formats.dispatch import decode
from bitplan.packed.checkpoints.tensor_sources import forget
from bitplan.packed.layer_replacement import are_columns
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.quant_linear import QuantLinear


def dequantize(model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Put plain layers in the place of all packed ones, in place; weights take the room of unpacked ones again.

    dtype   the type of the weights that were packed; the model's own unless given

    Numbers that packing rounded stay rounded. Weights that layers share stay shared.
    """
    if hasattr(model, "peft_config"):
        raise StoreError("dequantize: the model has adapters; dequantize the model below them (model.get_base_model())")
    layers = {
        path: module
        for path, module in model.named_modules()
        if any(isinstance(child, PackedWeight) for child in module.children())
    }
    if not layers:
        raise StoreError(f"dequantize: nothing in this {type(model).__name__} is packed")
    if "" in layers:
        raise StoreError("dequantize: the model itself is one packed layer, which has no parent to be replaced in")
    target = dtype or _type_of(model)
    skeleton: nn.Module | None = None
    plain: dict[str, nn.Module] = {}
    numbers: dict[int, nn.Parameter] = {}
    for path, layer in layers.items():
        plain_layer = _plain_twin(layer)
        if plain_layer is None:
            skeleton = skeleton or _skeleton(model, path)
            plain_layer = skeleton.get_submodule(path)
        _fill(plain_layer, layer, target, numbers)
        plain[path] = plain_layer.train(layer.training)
    for path, plain_layer in plain.items():
        model.set_submodule(path, plain_layer)
    forget(model)


def _type_of(model: nn.Module) -> torch.dtype:
    """The type of the model's other floats."""
    kinds = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return kinds[0] if kinds else torch.float32


def _plain_twin(layer: nn.Module) -> nn.Module | None:
    """torch's own layer for a packed one, on meta; None where only transformers has it."""
    with torch.device("meta"):
        if isinstance(layer, QuantLinear):
            rows, columns = layer.weight.shape
            return nn.Linear(columns, rows, bias=layer.bias is not None)
        if isinstance(layer, QuantEmbedding) and layer.scale is None:
            return nn.Embedding(layer.num_embeddings, layer.embedding_dim, padding_idx=layer.padding_idx)
    return None


def _skeleton(model: Any, path: str) -> nn.Module:
    """A model of the same class and config, whose parameters lie on meta."""
    if not hasattr(type(model), "_from_config"):
        raise StoreError(
            f"dequantize: {path!r} is a {type(model.get_submodule(path)).__name__}, which only models of transformers "
            f"have, and this is a {type(model).__name__}"
        )
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    from transformers import initialization

    with silence_transformers(), torch.device("meta"), initialization.no_tie_weights():
        skeleton: nn.Module = type(model)._from_config(config)
    return skeleton


def _fill(plain: Any, layer: nn.Module, dtype: torch.dtype, numbers: dict[int, nn.Parameter]) -> None:
    """Decoded weights, each once however many layers share it, and the layer's own biases."""
    for local, weight in layer.named_children():
        if not isinstance(weight, PackedWeight):
            continue
        if id(weight) not in numbers:
            decoded = decode(weight.encoded, dtype)
            if are_columns(plain, local):
                decoded = decoded.transpose(1, 2).contiguous()
            numbers[id(weight)] = nn.Parameter(decoded, requires_grad=dtype.is_floating_point)
        plain.register_parameter(local, numbers[id(weight)])
    for local, parameter in layer.named_parameters(recurse=False):
        plain.register_parameter(local, parameter)
    if isinstance(layer, QuantEmbedding) and layer.scale is not None:
        plain.register_buffer("embed_scale", layer.scale.detach().clone(), persistent=False)
