"""LoRA adapters of peft on models whose layers are packed: `get_peft_model`, and `load_adapter` for one that was saved.

peft alone refuses a packed layer. Adapters stay in their own floating type and train; the packed weight stays as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn

from bitplan.base.documents import Fields
from bitplan.base.optional import require
from bitplan.base.records import read_json

peft = require("peft", purpose="bitplan.peft", extra="train")

from peft.tuners.lora.layer import Linear as LoraLinear  # noqa: E402

from bitplan.files.safetensors import SafetensorsFile  # noqa: E402
from bitplan.files.transformers_names import foreign_faults  # noqa: E402
from bitplan.packed.product_strategy import LayerError  # noqa: E402
from bitplan.packed.quant_embedding import QuantEmbedding  # noqa: E402
from bitplan.packed.quant_linear import QuantLinear  # noqa: E402

__all__ = ["LoraPackedLinear", "get_peft_model", "load_adapter"]


class LoraPackedLinear(LoraLinear):  # type: ignore[misc]
    """A LoRA adapter on a packed linear layer. It cannot be merged: a packed weight takes no sum."""

    def merge(self, *_: Any, **__: Any) -> None:
        layer = cast(QuantLinear, self.get_base_layer())
        raise LayerError(
            f"an adapter cannot be merged into a weight packed in {layer.weight.fmt.name}: "
            "save the adapter (save_pretrained), load it on the unpacked model, merge it there and quantize the result"
        )


def get_peft_model(model: nn.Module, peft_config: Any, **options: Any) -> Any:
    """The model with LoRA adapters, on packed and plain linear layers alike; options are those of peft's own function.

    "all-linear" as `target_modules` is every linear layer, packed or not, except the output head, as in peft.
    """
    _check_model(model)
    _refuse_copies_of_packed_layers(model, peft_config)
    if isinstance(getattr(peft_config, "target_modules", None), str) and peft_config.target_modules == "all-linear":
        peft_config.target_modules = _names_of_linears(model)
    with _packed_layers_known(peft_config):
        return peft.get_peft_model(model, peft_config, **options)


def load_adapter(model: nn.Module, folder: Path | str, **options: Any) -> Any:
    """The model with the adapter of a folder that `save_pretrained` wrote; options are PeftModel.from_pretrained's."""
    _check_model(model)
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        raise LayerError(f"{folder}: no adapter_config.json, so not an adapter's folder; save_pretrained writes one")
    Fields(read_json(path), str(path))
    if (weights := path.with_name("adapter_model.safetensors")).is_file():
        SafetensorsFile(weights).close()
    with foreign_faults(LayerError, f"{folder}: peft cannot put this adapter on the model"):
        peft_config = peft.PeftConfig.from_pretrained(str(folder))
        with _packed_layers_known(peft_config):
            return peft.PeftModel.from_pretrained(model, str(folder), config=peft_config, **options)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise LayerError(
            f"adapters go on a model that is loaded, a torch.nn.Module, got a {type(model).__name__}; "
            "load_packed gives one"
        )


def _refuse_copies_of_packed_layers(model: nn.Module, peft_config: Any) -> None:
    """Raise for adapters that would copy a packed layer to train it: packed weights are not trained."""
    copied = tuple(getattr(peft_config, "modules_to_save", None) or ())
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding) and any(
            f".{name}".endswith(f".{saved}") for saved in copied
        ):
            raise LayerError(f"modules_to_save: {name} is packed and cannot be trained; keep it unpacked in the plan")
    if getattr(peft_config, "trainable_token_indices", None) and any(
        isinstance(module, QuantEmbedding) for module in model.modules()
    ):
        raise LayerError("trainable_token_indices: the embedding is packed; keep it unpacked in the plan")


@contextmanager
def _packed_layers_known(peft_config: Any) -> Iterator[None]:
    if not isinstance(peft_config, peft.LoraConfig):
        raise LayerError(f"packed layers take LoRA adapters: expected a LoraConfig, got {type(peft_config).__name__}")
    if peft_config.use_dora:
        raise LayerError("packed layers take no DoRA adapters, which need the weight's norms: use_dora=False")
    peft_config._register_custom_module({QuantLinear: LoraPackedLinear})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type .*QuantLinear", UserWarning)
        yield


def _names_of_linears(model: nn.Module) -> set[str]:
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear | nn.Linear)]
    return {name for name, module in linears if module is not head}
