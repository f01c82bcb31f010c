"""KVCache: a transformers cache that holds keys and values in formats, and decodes a layer when it is attended to.

`KVFormats` (plan/kv_formats.py) says which part gets which format, and when a row is rounded. A layer holds the parts
of a format, codes and scales, as [batch, heads, tokens, width] each, so whatever transformers does with the tokens of a
cache (crop, reorder, select) is done with every part. Decoding goes tile by tile: beside the packed cache memory holds
the keys and values of one layer.

    model.generate(**inputs, past_key_values=KVCache(model.config, "int8:int4"))

`rounded_kv.round_kv` lets a model do so in all its calls.
Layers of full attention and of sliding windows are held so, those without keys and values (linear attention) are left
as they are; any other kind of layer, and a static cache, is refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitplan.base.errors import MeasureError
from bitplan.base.optional import require
from bitplan.formats import get_format
from bitplan.formats.format import Format
from bitplan.packed.kv_rows import PackedRows
from bitplan.plan.kv_formats import KVFormats

require("transformers", purpose="a cache of keys and values", extra="models")
from transformers.cache_utils import (  # noqa: E402
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)


class _PackedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer of full attention, with keys and values in formats.

    stores   False: rows are rounded and given back, and none is kept, for one pass over a whole text
    """

    formats: tuple[Format | None, Format | None] = (None, None)
    stores = True
    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            PackedRows(fmt, rows.shape[-1], rows.dtype)
            for fmt, rows in zip(self.formats, (key_states, value_states), strict=True)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, Tensor]:
        """Round and hold these tokens; gives the numbers of all that they may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = self.keys.followed_by(self.keys.packed(key_states))
        values = self.values.followed_by(self.values.packed(value_states))
        if self.stores:
            self._hold(keys, values, key_states.shape[-2])
        return keys.numbers(), values.numbers()

    def reset(self) -> None:
        """Drop all tokens: transformers before 5.20 would zero the numbers in place and keep their count."""
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def _hold(self, keys: PackedRows, values: PackedRows, _tokens: int) -> None:
        self.keys, self.values = keys, values


class _JoinedLayer(_PackedLayer):
    """A layer of full attention on a GPU whose attention reads codes (kv_attention.py).

    Its memory has spare room, and one token is given out as the cache itself. What transformers changes (crop,
    reorder, select) is set as `keys` and `values`, and copied into memory with room when the next token comes.
    """

    shared: Any = None
    _rows: Any = None
    _set_rows: tuple[Any, Any] = (None, None)

    def _view(self, which: int) -> Any:
        return self._set_rows[which] if self._rows is None else self._rows.rows(which)

    def _set(self, which: int, rows: Any) -> None:
        both = [self._view(0), self._view(1)]
        both[which] = rows
        self._rows, self._set_rows = None, (both[0], both[1])

    keys = property(lambda self: self._view(0), lambda self, rows: self._set(0, rows))
    values = property(lambda self: self._view(1), lambda self, rows: self._set(1, rows))

    def get_seq_length(self, *_args: Any) -> int:
        return int(self._rows.tokens) if self._rows is not None else int(super().get_seq_length())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Hold these tokens; one token gets the cache itself where the kernels can read it."""
        from bitplan.packed import kv_attention

        width, same = key_states.shape[-1], key_states.shape == value_states.shape
        like = width, key_states.device, key_states.dtype
        if not (self.stores and same and kv_attention.can_join(self.formats, *like)):
            return super().update(key_states, value_states, *args, **options)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._rows is None:
            self._rows = self._with_room(kv_attention)
        if key_states.shape[-2] == 1:
            self._rows.append(key_states, value_states)
            return self._rows, self._rows
        tokens = self._rows.tokens + key_states.shape[-2]
        for which, rows in enumerate((key_states, value_states)):
            self._rows.extend(which, kv_attention.encode_rows(rows, self._rows.formats[which]), tokens)
        self._rows.tokens = tokens
        return self.keys.numbers(), self.values.numbers()

    def _with_room(self, kv_attention: Any) -> Any:
        both = self._set_rows
        rows = kv_attention.JoinedRows(self.formats, both[0].width, both[0].dtype, self.shared)
        if both[0].parts:
            for which, packed in enumerate(both):
                rows.extend(which, packed.parts, packed.shape[-2])
            rows.tokens = both[0].shape[-2]
        self._set_rows = (None, None)
        return rows


class _PackedWindow(_PackedLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer that attends to a window: of the tokens before, those are held that the next one still sees."""

    _sliding_window_tensor: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _PackedLayer.lazy_initialization(self, key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def activate_past_recording(self) -> None:
        raise MeasureError(
            "keys and values of a sliding window in formats cannot go back; keep them as they are",
            settings={"kv": "keep"},
        )

    def _hold(self, keys: PackedRows, values: PackedRows, tokens: int) -> None:
        self.cumulative_length += tokens
        window = slice(-self.sliding_window + 1, None)
        # A view would hold what has left the window.
        self.keys, self.values = (rows[:, :, window, :].contiguous() for rows in (keys, values))


def _packed_layer(layer: Any, index: int, formats: KVFormats, *, stores: bool, shared: Any) -> Any:
    """An empty layer of transformers as one that packs; those without keys and values as they are."""
    if not isinstance(layer, CacheLayerMixin):
        return layer
    if type(layer) is DynamicSlidingWindowLayer:
        packed = _PackedWindow(layer.sliding_window)
    elif type(layer) is DynamicLayer:
        packed = _PackedLayer() if shared is None else _JoinedLayer()
        packed.shared = shared
    else:
        raise MeasureError(
            f"layer {index}: keys and values of a {type(layer).__name__} cannot be kept in formats, only those of "
            "dynamic layers of full attention or sliding windows; keep them as they are, or take a dynamic cache"
        )
    keys, values = (None if name is None else get_format(name) for name in formats.of_layer(index))
    packed.formats = keys, values
    packed.stores = stores
    return packed


class KVCache(DynamicCache):  # type: ignore[misc]
    """A cache for a model of this config, with keys and values in formats: "int8", "int8:int4", or `KVFormats`.

    stores   False: nothing is kept of a call, for texts that are read in one pass
    joined   the model's attention is kv_attention's, which reads codes: `round_kv` sees to it
    """

    def __init__(self, config: Any, formats: KVFormats | str, *, stores: bool = True, joined: bool = False) -> None:
        super().__init__(config=config.get_text_config(decoder=True))
        parsed = KVFormats.parse(formats) if isinstance(formats, str) else formats
        pack_layers(self, parsed, stores=stores, joined=joined)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that are held."""
        return kv_bytes(self)


def pack_layers(cache: Any, formats: KVFormats, *, stores: bool = True, joined: bool = False) -> None:
    """Let the empty layers of a cache hold keys and values in formats; a cache that holds so already is as it was."""
    if any(isinstance(layer, _PackedLayer) for layer in cache.layers):
        return
    shared = None
    if joined:
        from bitplan.packed.kv_attention import SharedCount

        shared = SharedCount()
    cache.layers = [
        _packed_layer(layer, index, formats, stores=stores, shared=shared) for index, layer in enumerate(cache.layers)
    ]


def kv_bytes(cache: Any) -> int:
    """Bytes of the keys and values that any cache holds."""
    parts = [part for layer in cache.layers for part in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(part.nbytes for part in parts if part is not None)
