"""Inputs that a module's forward takes, made from its config, or from the arguments of its forward.

They say only what kind of input it is: the run has no numbers beside token ids and positions.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 8
MOST_TRIES = 40

Example = tuple[tuple[Any, ...], dict[str, Any]]


def examples_for(model: nn.Module) -> Iterator[Example]:
    """Examples to try, the likeliest first."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "main_input_name"):
        yield from _from_config(model, config)
    yield from itertools.islice(_from_signature(model), MOST_TRIES)


def _ids(size: int, length: int = TOKENS) -> Tensor:
    return torch.arange(3, 3 + length).remainder(max(size, 1))[None]


def _setting(config: Any, *names: str) -> Any:
    """The first setting that a config or one of its inner configs has."""
    inner = [config, *(getattr(config, key, None) for key in ("text_config", "vision_config", "audio_config"))]
    for part in inner:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _from_config(model: nn.Module, config: Any) -> Iterator[Example]:
    taken = set(_parameters(model))
    main = str(model.main_input_name)
    size = _setting(config, "vocab_size")
    settings = {"use_cache": False} if "use_cache" in taken or "kwargs" in taken else {}
    if main == "input_ids" and isinstance(size, int):
        lengths = (TOKENS, 64, 256)
        for length in lengths:
            given: dict[str, Any] = {"input_ids": _ids(size, length)}
            if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
                given["decoder_input_ids"] = _ids(size, length)
            yield (), given | ({"use_cache": False} if "use_cache" in taken else {})
            yield (), given
    if main == "pixel_values":
        for pixels in _pixels(config):
            yield (), {"pixel_values": pixels}
    if main == "input_features":
        bins = _setting(config, "num_mel_bins", "input_dim", "feature_size") or 80
        frames = 2 * (_setting(config, "max_source_positions") or 32)
        for shape in ((1, bins, frames), (1, frames, bins)):
            given = {"input_features": torch.zeros(shape)}
            if "decoder_input_ids" in taken and isinstance(size, int):
                given["decoder_input_ids"] = _ids(size)
            yield (), given | ({"use_cache": False} if "use_cache" in taken else {})
    if main == "input_values":
        yield (), {"input_values": torch.zeros(1, 4000)} | settings
        yield (), {"input_values": torch.zeros(1, _setting(config, "audio_channels", "num_channels") or 1, 4000)}
        bins, frames = _setting(config, "num_mel_bins") or 128, _setting(config, "max_length") or 1024
        yield (), {"input_values": torch.zeros(1, frames, bins)}
    if "input_ids" in taken and "pixel_values" in taken and isinstance(size, int):
        for pixels in _pixels(config):
            yield (), {"input_ids": _ids(size), "pixel_values": pixels}


def _pixels(config: Any) -> Iterator[Tensor]:
    channels = _setting(config, "num_channels", "in_channels", "in_chans") or 3
    side, frames = _setting(config, "image_size", "img_size"), _setting(config, "num_frames")
    if isinstance(frames, int) and isinstance(side, int):
        yield torch.zeros(1, frames, channels, side, side)
    sides = [side] if isinstance(side, int) else []
    if isinstance(side, list | tuple) and len(side) == 2:
        yield torch.zeros(1, channels, *side)
    for pixels in (*sides, 32, 64, 224):
        yield torch.zeros(1, channels, pixels, pixels)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _from_signature(model: nn.Module) -> Iterator[Example]:
    """Every required argument as one of a few kinds: what the model's first layers take."""
    required = [
        parameter
        for parameter in _parameters(model).values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in _parameters(model).values())
    if not required and not variadic:
        required = [next(iter(_parameters(model).values()), None)]  # type: ignore[list-item]
    kinds = list(_kinds(model))
    for chosen in itertools.product(kinds, repeat=max(1, len(required))):
        yield chosen, {}


def _kinds(model: nn.Module) -> Iterator[Tensor]:
    tables = [size for module in model.modules() if type(size := getattr(module, "num_embeddings", None)) is int]
    inputs = [size for module in model.modules() if type(size := getattr(module, "in_features", None)) is int]
    channels: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            channels.setdefault(len(module.kernel_size), module.in_channels)
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    for rank in sorted(channels, reverse=True):
        yield torch.zeros(1, channels[rank], *(32,) * rank, dtype=dtype)
    if tables:
        yield _ids(tables[0])
    for width in dict.fromkeys(inputs[:1]):
        yield torch.zeros(1, TOKENS, width, dtype=dtype)
        yield torch.zeros(1, width, dtype=dtype)
    yield torch.zeros(1, dtype=torch.long)
    yield torch.zeros(1, dtype=dtype)
