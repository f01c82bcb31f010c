"""The Parameters of a module, under every name that each has, and how a user may name them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import nn

from bitplan.plan.format_choices import NamedBy, NamedTensor
from bitplan.plan.structure.describe import is_norm

LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
_WEIGHT = re.compile(r"weight|weight_(ih|hh|hr)(_l\d+(_reverse)?)?|(in|q|k|v)_proj_weight")


@dataclass(frozen=True)
class NamedParameter:
    """One name of a Parameter: the module that holds it and the name there."""

    name: str
    module: nn.Module
    local: str
    parameter: nn.Parameter

    @property
    def key(self) -> tuple[int, str]:
        """A key for dicts, equal for all names under which a module has this Parameter."""
        return id(self.module), self.local

    @property
    def owner(self) -> str:
        return self.name[: -len(self.local)].rstrip(".")

    @property
    def role(self) -> Literal["weight", "bias", "norm", "other"]:
        if "bias" in self.local:
            return "bias"
        if isinstance(self.module, LAYERS) and _WEIGHT.fullmatch(self.local):
            return "weight"
        return "norm" if is_norm(self.module) else "other"

    def spec(self, norms: bool = False) -> NamedTensor:
        """Describe it for `choose_formats`: biases, norms and parameters of unknown layers must be named by users."""
        named_by: dict[str, NamedBy] = {"weight": "any", "norm": "any" if norms else "module"}
        unknown = f"not a weight of a known layer ({type(self.module).__name__}): left alone unless named"
        shape = (0, 0) if nn.parameter.is_lazy(self.parameter) else tuple(self.parameter.shape)
        return NamedTensor.of(
            self.name,
            shape,
            dtype=self.parameter.dtype,
            named_by=named_by.get(self.role, "own name"),
            else_stays=unknown if self.role == "other" else f"{self.role}: left alone",
        )


def named_parameters_of(model: nn.Module) -> list[NamedParameter]:
    """Every Parameter under every name it has: modules used twice and tied weights appear twice."""
    return [
        NamedParameter(f"{path}.{local}".lstrip("."), module, local, parameter)
        for path, module in model.named_modules(remove_duplicate=False)
        for local, parameter in module._parameters.items()
        if parameter is not None
    ]
