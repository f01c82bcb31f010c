"""TileCache: the hottest parts of packed weights kept expanded, within a budget of bytes.

A tile is a piece of rows of one weight, expanded to the compute type. All layers of a model share one cache. A piece is
up to 256 MiB, so that a cached matrix is mostly one product: on an H200 an 8192 x 8192 matrix in four pieces took
72 us for 64 rows where one product takes 38.

A model runs its layers in turn. If they do not all fit the budget, evicting the least recently used tile would evict
each tile just before its next use: no lookup would ever hit. So a tile replaces others only if it was asked for twice
since they were used; else it is expanded for one use. The layers that came first stay, as many as fit, until another
model runs more often. "auto" adds tiles only where there is room left (`has_room`). The budget is 0 unless one is
given.

A compiled or captured graph reads memory that must stay where it is: `pin` gives a whole matrix that is never evicted.
It counts towards the budget as long as its weight lives.

Tiles of a weight that was moved, loaded or freed are dropped at once (`PackedWeight.tell`). The lock is held for
lookups only, never while a tile is made: two threads may make the same tile, and one of the two is kept. On CUDA a tile
made on one stream and used on another waits for its maker.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.packed.packed_weight import PackedWeight, State
from bitplan.packed.products.decode_row_slices import Piece, cut, rows_of

TILE_BYTES = 256 * 2**20
UNCACHED_BYTES = 32 * 2**20  # size of pieces that are not kept, but expanded for one use
ROWS_WORTH_A_TILE = 64  # tiles of fewer rows are not worth a product of their own
_COUNTS = ("hits", "misses", "evictions", "bypassed", "refused", "dropped")
_tokens = itertools.count(1)
Key = tuple[int, State, torch.dtype, int, int]  # token and state of the weight, type, first row, end


class TiledWeight(Protocol):
    """What the cache needs of a weight: its key, its state and its bytes."""

    @property
    def token(self) -> int: ...

    @property
    def state(self) -> State: ...

    @property
    def encoded(self) -> Encoded: ...


@dataclass(frozen=True)
class CacheCounters:
    """Counts since the cache was made or `reset_counters` was called, and the bytes it holds now."""

    hits: int
    misses: int
    evictions: int
    bypassed: int  # misses that were not kept: all tiles here were used since that tile was last asked for
    refused: int  # tiles larger than the whole budget
    dropped: int  # tiles whose weight changed
    tiles: int
    nbytes: int
    budget_bytes: int

    @property
    def hit_rate(self) -> float | None:
        looked = self.hits + self.misses
        return self.hits / looked if looked else None


@dataclass(frozen=True)
class _Tile:
    values: Tensor
    ready: Any  # the CUDA event after which the tile may be read; None on a CPU
    stream: Any


class TileCache:
    """A cache of decoded pieces (tiles) of packed weights, at most `budget_bytes` in all."""

    def __init__(self, budget_bytes: int = 0, *, tile_bytes: int = TILE_BYTES) -> None:
        sizes = (budget_bytes, tile_bytes)
        if not all(isinstance(size, int) for size in sizes) or budget_bytes < 0 or tile_bytes < 1:
            raise StoreError(
                "a tile cache needs a budget of 0 bytes or more and tiles of 1 byte or more, as integers, "
                f"got {budget_bytes!r} and {tile_bytes!r}"
            )
        self.token = next(_tokens)  # never reused, unlike an id()
        self.budget_bytes, self.tile_bytes = budget_bytes, tile_bytes
        self._tiles: OrderedDict[Key, _Tile] = OrderedDict()  # least recently used first
        self._pinned: dict[Key, Tensor] = {}
        self._asked: dict[Key, int] = {}  # number of the last lookup of each tile, kept or not
        self._lookups = 0
        self._lock = threading.Lock()
        self._nbytes = 0
        self._counts = dict.fromkeys(_COUNTS, 0)

    def __repr__(self) -> str:
        return f"TileCache({self.counters})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model shares the cache: its budget is the machine's memory, not the model's."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A cache saved with a whole model is loaded empty: tiles are made again, and a lock cannot be saved."""
        return _new_cache, (self.budget_bytes, self.tile_bytes)

    @property
    def counters(self) -> CacheCounters:
        with self._lock:
            return CacheCounters(
                **self._counts, tiles=len(self._tiles), nbytes=self._nbytes, budget_bytes=self.budget_bytes
            )

    def reset_counters(self) -> None:
        with self._lock:
            self._counts = dict.fromkeys(_COUNTS, 0)

    # ---- tiles ------------------------------------------------------------------------------------------------------

    def pieces_of(self, weight: PackedWeight, dtype: torch.dtype) -> list[slice]:
        """The slices of rows into which a weight is cut as tiles."""
        rows, cols = weight.shape
        row_bytes = max(1, cols * dtype.itemsize)
        fits = self.budget_bytes >= ROWS_WORTH_A_TILE * row_bytes
        limit = min(self.tile_bytes, self.budget_bytes if fits else UNCACHED_BYTES)
        return cut(rows, limit // row_bytes)

    def pieces(self, weight: PackedWeight, dtype: torch.dtype) -> Iterator[Piece]:
        """The weight's rows, expanded: from the cache, or made and kept where the budget allows."""
        weight.add_listener(self)
        for rows in self.pieces_of(weight, dtype):
            yield rows, self.tile(weight, dtype, rows)

    def tile(self, weight: TiledWeight, dtype: torch.dtype, rows: slice) -> Tensor:
        """One tile of a weight, decoded: from the cache, or made now and kept if there is room."""
        for (token, state, kind, _, _), values in self._pinned.items():
            if (token, state, kind) == (weight.token, weight.state, dtype):
                return values[rows]
        key = (weight.token, weight.state, dtype, rows.start, rows.stop)
        with self._lock:
            cached, before = self._tiles.get(key), self._asked.get(key)
            self._lookups += 1
            self._asked[key] = self._lookups
            if cached is None:
                self._counts["misses"] += 1
            else:
                self._tiles.move_to_end(key)
                self._counts["hits"] += 1
        if cached is not None:
            return _readable(cached)
        values = decode(rows_of(weight.encoded, rows), dtype)
        self._keep(key, values, before)
        return values

    def pin(self, weight: PackedWeight, dtype: torch.dtype) -> Tensor | None:
        """All of a weight, expanded, and kept until the weight changes; None where the budget has no room for it."""
        key = (weight.token, weight.state, dtype, 0, weight.shape[0])
        pinned = self._pinned.get(key)
        if pinned is not None or not self.has_room(weight, dtype):
            return pinned
        weight.add_listener(self)
        values = decode(weight.encoded, dtype)
        with self._lock:
            self._forget([one for one in self._asked if one[0] == weight.token])
            self._pinned[key] = values
            self._nbytes += values.nbytes
        return values

    def has_room(self, weight: PackedWeight, dtype: torch.dtype) -> bool:
        """Whether all of a weight is cached, or fits without evicting anything."""
        if not self.budget_bytes:
            return False
        row_bytes: int = weight.shape[1] * dtype.itemsize
        state = weight.state
        if (weight.token, state, dtype, 0, weight.shape[0]) in self._pinned:
            return True
        with self._lock:
            needed = self._nbytes
            for rows in self.pieces_of(weight, dtype):
                if (weight.token, state, dtype, rows.start, rows.stop) not in self._tiles:
                    needed += (rows.stop - rows.start) * row_bytes
            return needed <= self.budget_bytes

    def drop(self, token: int) -> None:
        """Forget the tiles of a weight."""
        with self._lock:
            self._forget([key for key in (*self._asked, *self._pinned) if key[0] == token])

    def clear(self) -> None:
        with self._lock:
            self._counts["dropped"] += len(self._tiles)
            self._tiles.clear()
            self._asked.clear()
            self._nbytes = sum(values.nbytes for values in self._pinned.values())  # graphs read them

    def _keep(self, key: Key, values: Tensor, asked_before: int | None) -> None:
        with self._lock:
            if values.nbytes > self.budget_bytes:
                self._counts["refused"] += 1
                return
            if key in self._tiles:  # another thread was faster
                return
            # In-place writes change a state without notice: a tile of a newer state shows that older tiles are stale.
            self._forget([one for one in self._asked if one[0] == key[0] and one[1] != key[1]])
            leaving = self._leaving(values.nbytes, asked_before)
            if leaving is None:
                self._counts["bypassed"] += 1
                return
            for one in leaving:
                self._nbytes -= self._tiles.pop(one).values.nbytes
                self._counts["evictions"] += 1
            self._tiles[key] = _tile_of(values)
            self._nbytes += values.nbytes

    def _leaving(self, nbytes: int, asked_before: int | None) -> list[Key] | None:
        """The tiles to evict for `nbytes`; None where one of them was used after lookup `asked_before`."""
        leaving: list[Key] = []
        needed = self._nbytes + nbytes - self.budget_bytes
        for key, tile in self._tiles.items():
            if needed <= 0:
                break
            if asked_before is None or self._asked[key] > asked_before:
                return None
            leaving.append(key)
            needed -= tile.values.nbytes
        return leaving

    def _forget(self, keys: list[Key]) -> None:
        for key in keys:
            self._asked.pop(key, None)
            pinned = self._pinned.pop(key, None)
            if pinned is not None:
                self._nbytes -= pinned.nbytes
            tile = self._tiles.pop(key, None)
            if tile is not None:
                self._nbytes -= tile.values.nbytes
                self._counts["dropped"] += 1


def _new_cache(budget_bytes: int, tile_bytes: int) -> TileCache:
    return TileCache(budget_bytes, tile_bytes=tile_bytes)


def _tile_of(values: Tensor) -> _Tile:
    if not values.is_cuda:
        return _Tile(values, None, None)
    stream = torch.cuda.current_stream(values.device)
    return _Tile(values, stream.record_event(), stream)


def _readable(tile: _Tile) -> Tensor:
    """The tile's numbers, safe on the current stream, also if the tile is evicted while the GPU still reads it."""
    if tile.ready is not None:
        stream = torch.cuda.current_stream(tile.values.device)
        if stream != tile.stream:
            stream.wait_event(tile.ready)
            tile.values.record_stream(stream)
    return tile.values
