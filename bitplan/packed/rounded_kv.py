"""A whole model that keeps keys and values in formats: set, read, and ended; the cache itself is `KVCache`.

round_kv(model, "int8:int4")     # in every call: generate, forward, one pass over a text; None ends it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from bitplan.base.errors import MeasureError
from bitplan.plan.kv_formats import KVFormats


@dataclass(frozen=True)
class _GiveCache:
    """A hook before a model's forward: whatever cache a call brings or makes holds keys and values in formats."""

    formats: KVFormats
    attention: str | None  # the model's own, in place of which kv_attention's is; None: it kept its own

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if model.training:
            return None
        from transformers.cache_utils import Cache, DynamicCache

        from bitplan.packed.kv_cache import KVCache, pack_layers  # which needs transformers

        cache, asked = kwargs.get("past_key_values"), kwargs.get("use_cache")
        stores = bool(getattr(model.config, "use_cache", True) if asked is None else asked)
        joined = self.attention is not None and _reads_codes(model)  # a model that shares the config may have ended it
        if cache is None:
            kwargs["past_key_values"] = KVCache(model.config, self.formats, stores=stores, joined=joined)
        elif not isinstance(cache, Cache):
            raise MeasureError(f"past_key_values must be a cache of transformers, got a {type(cache).__name__}")
        elif not isinstance(cache, KVCache) and cache.get_seq_length() == 0:
            if not cache.layers:  # made without a config
                cache.layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
            pack_layers(cache, self.formats, joined=joined)
        return args, kwargs


def round_kv(model: nn.Module, formats: KVFormats | str | None) -> None:
    """Let a language model keep keys and values in formats, in every call but in training; None: as they are.

    Caches that `generate` or a caller makes are changed when they come in empty; one that holds tokens already stays.
    """
    parsed = KVFormats.parse(formats) if isinstance(formats, str) else formats
    if parsed is not None:
        from bitplan.packed.kv_cache import KVCache  # which needs transformers

        KVCache(model.config, parsed)  # refuses what cannot be held, before a text is begun
    for key, hook in [*model._forward_pre_hooks.items()]:
        if isinstance(hook, _GiveCache):
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
            if hook.attention is not None:
                model.set_attn_implementation(hook.attention)  # type: ignore[operator]
    if parsed is not None:
        model.register_forward_pre_hook(_GiveCache(parsed, _join_attention(model)), with_kwargs=True)


def _attention(model: Any) -> str | None:
    return getattr(model.config, "_attn_implementation", None)


def _reads_codes(model: Any) -> bool:
    from bitplan.packed import kv_attention  # which needs Triton

    return _attention(model) == kv_attention.ATTENTION


def _join_attention(model: Any) -> str | None:
    """Give a model on a GPU the attention that reads codes; gives the name of its own, None where it keeps that."""
    device = next((one.device for one in (*model.parameters(), *model.buffers())), None)
    if device is None or device.type != "cuda" or not getattr(model, "_supports_attention_backend", False):
        return None
    return _set_attention(model)


def _set_attention(model: Any) -> str | None:
    from bitplan.packed import kv_attention  # which needs Triton

    if _attention(model) != "sdpa" and not _reads_codes(model):  # it may share its config with one that does
        return None
    kv_attention.register()
    model.set_attn_implementation(kv_attention.ATTENTION)
    return "sdpa"


@contextmanager
def attending_as_held(model: nn.Module) -> Iterator[bool]:
    """Within the block, a model on a GPU attends to keys and values as they are held; gives whether it can."""
    before = None if _reads_codes(model) else _join_attention(model)
    try:
        yield _reads_codes(model)
    finally:
        if before is not None:
            model.set_attn_implementation(before)  # type: ignore[operator]


def kv_of(model: nn.Module) -> KVFormats | None:
    """The formats in which a model keeps keys and values; None: as they are."""
    hooks = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _GiveCache))
    return next((hook.formats for hook in hooks), None)


def shown_kv(model: nn.Module) -> str | None:
    """The formats in which a model keeps keys and values, in words; None: as they are."""
    formats = kv_of(model)
    return None if formats is None else str(formats)


@contextmanager
def rounded_kv(model: nn.Module, formats: KVFormats | str | None) -> Iterator[None]:
    """Within the block, a model keeps keys and values in these formats."""
    before = kv_of(model)
    round_kv(model, formats)
    try:
        yield
    finally:
        round_kv(model, before)
