"""transformers' registry: `AutoModelForCausalLM.from_pretrained(folder)` loads what `bitplan quantize` wrote.

transformers loads the plain tensors. Packed layers are hidden from it until it is done, and are then filled as
`load_packed` fills them. bitplan checks everything first, because transformers fills a missing tensor with random
numbers and only warns.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitplan.base.errors import StoreError
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import (
    PLAN,
    QUANT_METHOD,
    QUANT_METHODS,
    VERSION,
    check_packed_config,
    folder_inputs,
    folder_kv,
    read_config,
    read_packed_plan,
)
from bitplan.files.tensor_file import TensorFile
from bitplan.files.tensor_recipes import Assignment
from bitplan.files.transformers_names import forget_weights_file
from bitplan.packed.checkpoints.load import (
    check_norms,
    decide,
    device_of,
    finish,
    inputs_by_target,
    make_layers,
    place_all,
    read_values,
)
from bitplan.packed.rounded_inputs import set_inputs
from bitplan.packed.rounded_kv import round_kv
from bitplan.plan.plan import Plan


class BitplanConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """transformers' object for the `quantization_config` of a folder that bitplan packed."""

    def __init__(
        self,
        version: int = VERSION,
        plan: str = PLAN,
        plan_sha256: str = "",
        quant_method: str = QUANT_METHOD,
        inputs: str | None = None,
        kv_cache: dict[str, Any] | None = None,
        **_theirs: Any,
    ) -> None:
        self.quant_method = quant_method
        self.version, self.plan, self.plan_sha256 = version, plan, plan_sha256
        if inputs is not None:
            self.inputs = inputs
        if kv_cache is not None:
            self.kv_cache = kv_cache


class _Unfilled(nn.Module):
    """Stands where a packed layer will be; what stays plain of it (its biases) is there for transformers to load.

    An `_init_weights` may read the children of a layer (T5's does): weights and sizes are there for it as plain
    attributes, on meta, where nothing can be written.
    """

    def __init__(self, layer: nn.Module, packed: Collection[str]) -> None:
        super().__init__()
        for name, parameter in layer._parameters.items():
            if name not in packed:
                self.register_parameter(name, parameter)
        sizes = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        weights = {name: value for name, value in layer._parameters.items() if name in packed}
        self.__dict__ |= sizes | weights  # not registered, so that the weights are no keys to load


class BitplanQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads packed folders; it does not pack a plain model (`bitplan quantize` does)."""

    requires_calibration = True

    def __init__(self, quantization_config: QuantizationConfigMixin, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._layers: dict[str, nn.Module] = {}
        self._packed = Assignment(())
        self._all = Assignment(())
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._folder = Path()
        self._file: TensorFile | None = None
        self._config: dict[str, Any] = {}
        self._plan: Plan | None = None
        self._device = torch.device("cpu")

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train over packed layers; the packed weights are constants."""
        return True

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        raise StoreError(
            f"dequantize: a packed {type(model).__name__} is not unpacked in place; "
            "bitplan.files.export_model(folder, output, 'hf', 'float32') writes a plain folder for from_pretrained"
        )

    def update_device_map(self, device_map: Any) -> Any:
        if isinstance(
            device_map, str
        ):  # "auto" and similar names spread a model over devices; a packed model goes to the first
            device_map = {"": "cuda" if torch.cuda.is_available() else "cpu"}
        devices = {"cpu"} if device_map is None else set(device_map.values())
        if len(devices) > 1 or "disk" in devices:
            raise StoreError(
                "from_pretrained: a packed model goes to one device, and device_map names "
                f"{sorted(map(str, devices))}; give one, such as device_map='cuda'"
            )
        self._device = device_of(next(iter(devices)))
        return {"": self._device}

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove from the config the message that stops a transformers without this plug-in; called by transformers."""
        return forget_weights_file(config)

    update_tp_plan = update_attn_implementation  # what transformers calls with the config up to 5.17

    def _process_model_before_weight_loading(
        self, model: Any, *, checkpoint_files: list[str] | None = None, **_theirs: Any
    ) -> Any:
        if not checkpoint_files:
            raise StoreError("from_pretrained: a packed model is loaded from the folder that holds it")
        self._folder = Path(checkpoint_files[0]).parent
        _check_inside(getattr(model.config, "_name_or_path", ""), checkpoint_files)
        self._config = read_config(self._folder)
        has_plan = (self._folder / check_packed_config(self._folder, self._config)["plan"]).is_file()
        self._plan = read_packed_plan(self._folder, self._config) if has_plan else None  # a download may leave it out
        with torch.device("cpu"):
            file = self._file = open_tensors(self._folder)
            weakref.finalize(self, file.close)  # where loading fails on the way
            self._all, self._dtypes = decide(model, file, self._plan, None, self._device, str(self._folder))
            check_norms(file)  # transformers will read the norms, and accepts NaN
            recipes = tuple(recipe for recipe in self._all.recipes if recipe.format_in(file) is not None)
        packed_targets = {recipe.targets[0] for recipe in recipes}
        ties = {target: source for target, source in self._all.ties.items() if source in packed_targets}
        self._packed = Assignment(recipes, ties)
        packed_in: dict[str, set[str]] = {}
        for owner, _, local in (target.rpartition(".") for target in (*packed_targets, *ties)):
            packed_in.setdefault(owner, set()).add(local)
        for owner, packed in packed_in.items():
            self._layers[owner] = model.get_submodule(owner)
            model.set_submodule(owner, _Unfilled(self._layers[owner], packed))
        model.all_tied_weights_keys = {
            target: source
            for target, source in model.all_tied_weights_keys.items()
            if source not in {*packed_targets, *ties}
        }
        model._keys_to_ignore_on_load_unexpected = {".*"}  # `assign` has refused unexpected tensors already
        return model

    def _process_model_after_weight_loading(self, model: Any, **_theirs: Any) -> Any:
        biases = {
            f"{owner}.{local}": bias
            for owner in self._layers
            for local, bias in model.get_submodule(owner)._parameters.items()
            if bias is not None
        }
        assert self._file is not None
        with self._file as file:
            values = read_values(model, self._packed, file, self._device, self._dtypes, plan=self._plan, may_round=True)
            layers = make_layers(
                self._layers.__getitem__, values, biases, strategy="auto", cache=None, dtypes=self._dtypes
            )
            place_all(model, values, {}, layers)
            where = str(self._folder)
            set_inputs(layers, inputs_by_target(folder_inputs(self._config, self._plan), self._all, where), where)
            if hasattr(model, "generate"):
                round_kv(model, folder_kv(self._config, where))
            finish(
                model,
                file,
                self._all,
                self._device,
                folder=self._folder,
                config=self._config,
                plan=self._plan,
                where=str(self._folder),
            )
        # The model keeps this object, and is copied and pickled with it.
        self._layers, self._file, self._plan = {}, None, None
        self._packed = self._all = Assignment(())
        return model


def _check_inside(folder: str, files: list[str]) -> None:
    """Refuse an index that names files outside of the folder: transformers would follow it."""
    root = Path(os.path.abspath(folder))
    if not folder or not root.is_dir():  # a name on the hub
        return
    for file in files:
        if not Path(os.path.abspath(file)).is_relative_to(root):
            raise StoreError(
                f"{folder}: its index names {file!r}, which is not in the folder; copy or quantize the folder again"
            )


def register() -> None:
    """Make bitplan's folders known to transformers; a second call does nothing."""
    for method in QUANT_METHODS:
        if method not in AUTO_QUANTIZER_MAPPING:
            register_quantization_config(method)(BitplanConfig)
            register_quantizer(method)(BitplanQuantizer)
