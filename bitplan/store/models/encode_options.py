"""Remembers how a weight was encoded, from one version to the next."""

from __future__ import annotations

from typing import Literal, TypedDict, cast

import torch
from torch import Tensor

from bitplan.formats.scales.rules import ScaleRule


class EncodeOptions(TypedDict, total=False):
    """The options of `encode`, beside the tensor and the format."""

    scale_rule: ScaleRule | None
    percentile: float
    importance: Tensor | None
    scale: float | Tensor | None
    zero_point: int | None
    base: float | None
    pad: Literal["zero"] | None
    nonfinite: Literal["error", "replace"]


def merge_options(recipe: EncodeOptions, options: EncodeOptions) -> EncodeOptions:
    """Given options (not None) replace remembered ones; a new rule drops remembered options that it would not use."""
    given = {key: value for key, value in options.items() if value is not None}
    merged: dict[str, object] = dict(recipe)
    if "scale_rule" in given:
        merged.pop("scale", None)
        if given["scale_rule"] != "mse":
            merged.pop("importance", None)
    return cast(EncodeOptions, merged | given)


def same_options(one: EncodeOptions, two: EncodeOptions) -> bool:
    def equal(key: str) -> bool:
        left, right = one.get(key), two.get(key)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            return left is right or (left.shape == right.shape and torch.equal(left, right.to(left.device)))
        return not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right

    # `pad` decides whether a version can exist, not its numbers.
    return all(equal(key) for key in (one.keys() | two.keys()) - {"pad"})
