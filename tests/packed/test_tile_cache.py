"""TileCache: what stays, every counter and the budget, exactly; stale tiles are never handed out."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch

from bitplan.base.errors import StoreError
from bitplan.formats.codec import decode
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.tile_cache import TILE_BYTES, TileCache
from tests.packed.linear_samples import packed

ROWS, COLS = 8, 64
WHOLE = ROWS * COLS * 4  # bytes of a whole weight in float32


def weights(count: int) -> list[PackedWeight]:
    return [PackedWeight(packed("mxfp4", ROWS, COLS, seed=seed)) for seed in range(count)]


def use(cache: TileCache, weight: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([values for _, values in cache.pieces(weight, dtype)])


def counted(cache: TileCache) -> dict[str, int]:
    result = cache.counters
    return {
        name: getattr(result, name)
        for name in ("hits", "misses", "evictions", "bypassed", "refused", "dropped", "tiles", "nbytes")
        if getattr(result, name)
    }


def test_layers_in_turn_hit_as_often_as_the_budget_holds_of_them() -> None:
    """Pushing out the tile used longest ago would hit never."""
    cache, five = TileCache(2 * WHOLE), weights(5)
    for _ in range(8):
        for one in five:
            assert torch.equal(use(cache, one), decode(one.encoded))
    assert counted(cache) == {"hits": 14, "misses": 26, "bypassed": 24, "tiles": 2, "nbytes": 2 * WHOLE}
    assert cache.counters.hit_rate == 14 / 40


def test_a_tile_takes_the_place_of_one_that_was_not_used_since_it_was_asked_for() -> None:
    cache, (a, b, c) = TileCache(2 * WHOLE), weights(3)
    for one in (a, b, a, c):  # now b is the oldest, and c was never asked for before
        use(cache, one)
    assert counted(cache) == {"hits": 1, "misses": 3, "bypassed": 1, "tiles": 2, "nbytes": 2 * WHOLE}
    use(cache, c)  # twice since b was used
    assert counted(cache) == {
        "hits": 1,
        "misses": 4,
        "evictions": 1,
        "bypassed": 1,
        "tiles": 2,
        "nbytes": 2 * WHOLE,
    }
    use(cache, a)
    use(cache, c)
    assert cache.counters.hits == 3


def test_another_model_takes_the_cache_over_when_it_runs() -> None:
    cache, four = TileCache(2 * WHOLE), weights(4)
    for pair in (four[:2], four[2:]):
        for _ in range(4):
            for one in pair:
                use(cache, one)
    assert counted(cache) == {
        "hits": 10,
        "misses": 6,
        "evictions": 2,
        "bypassed": 2,
        "tiles": 2,
        "nbytes": 2 * WHOLE,
    }


def test_a_tile_is_the_decoded_weight_and_is_not_made_twice() -> None:
    cache, (a, _) = TileCache(2 * WHOLE), weights(2)
    assert torch.equal(use(cache, a), decode(a.encoded))
    first = next(cache.pieces(a, torch.float32))[1]
    assert next(cache.pieces(a, torch.float32))[1] is first


def test_a_tile_larger_than_the_budget_is_never_stored() -> None:
    cache, (a, _) = TileCache(WHOLE - 1, tile_bytes=WHOLE), weights(2)
    assert torch.equal(use(cache, a), decode(a.encoded))
    use(cache, a)
    assert counted(cache) == {"misses": 2, "refused": 2}


def test_the_budget_holds_to_the_byte() -> None:
    cache, (a, b) = TileCache(WHOLE), weights(2)
    use(cache, a)
    assert cache.counters.nbytes == WHOLE
    use(cache, b)
    use(cache, b)
    assert counted(cache) == {"misses": 3, "evictions": 1, "bypassed": 1, "tiles": 1, "nbytes": WHOLE}


def test_one_large_tile_pushes_out_as_many_as_it_needs() -> None:
    cache, small = TileCache(3 * WHOLE), weights(3)
    for one in small:
        use(cache, one)
    large = PackedWeight(packed("mxfp4", 2 * ROWS, COLS, seed=7))
    use(cache, large)
    use(cache, large)
    assert counted(cache) == {"misses": 5, "evictions": 2, "bypassed": 1, "tiles": 2, "nbytes": 3 * WHOLE}


def test_types_are_tiles_of_their_own() -> None:
    cache, (a,) = TileCache(2 * WHOLE), weights(1)
    use(cache, a)
    assert use(cache, a, torch.bfloat16).dtype == torch.bfloat16
    assert counted(cache) == {"misses": 2, "tiles": 2, "nbytes": WHOLE + WHOLE // 2}


@pytest.mark.parametrize(
    ("budget", "tile", "pieces"),
    [
        (10**9, TILE_BYTES, [(0, 256)]),  # a matrix that fits a tile is one product
        (10**9, 64 * 256, [(0, 64), (64, 128), (128, 192), (192, 256)]),
        (128 * 256, 10**9, [(0, 128), (128, 256)]),  # a small budget cuts finer, so that something can stay
        (63 * 256, 10**9, [(0, 256)]),  # but not into slivers
        (0, TILE_BYTES, [(0, 256)]),
    ],
)
def test_how_a_weight_is_cut(budget: int, tile: int, pieces: list[tuple[int, int]]) -> None:
    weight = PackedWeight(packed("mxfp4", 256, 64))  # 256 bytes a row in float32
    result = TileCache(budget, tile_bytes=tile).pieces_of(weight, torch.float32)
    assert [(piece.start, piece.stop) for piece in result] == pieces


def test_a_typical_matrix_is_one_tile() -> None:
    class Shaped:
        shape = (8192, 8192)

    assert len(TileCache(10**9).pieces_of(Shaped(), torch.bfloat16)) == 1  # type: ignore[arg-type]
    Shaped.shape = (28672, 8192)
    assert len(TileCache(10**9).pieces_of(Shaped(), torch.bfloat16)) == 2  # type: ignore[arg-type]


def test_a_loaded_weight_drops_its_tiles_and_no_others() -> None:
    cache, (a, b, c) = TileCache(10 * WHOLE), weights(3)
    use(cache, a)
    use(cache, b)
    a.load_state_dict(c.state_dict())
    assert counted(cache) == {"misses": 2, "dropped": 1, "tiles": 1, "nbytes": WHOLE}
    assert torch.equal(use(cache, a), decode(c.encoded))
    use(cache, b)
    assert cache.counters.hits == 1


def test_a_weight_written_in_place_is_not_stale_either() -> None:
    cache, (a,) = TileCache(10 * WHOLE), weights(1)
    use(cache, a)
    assert isinstance(a.data, torch.Tensor)
    a.data.zero_()
    assert not use(cache, a).any()
    assert counted(cache) == {"misses": 2, "dropped": 1, "tiles": 1, "nbytes": WHOLE}


def test_moved_and_freed_weights_leave_the_cache() -> None:
    cache, both = TileCache(10 * WHOLE), weights(2)
    for one in both:
        use(cache, one)
    both[0]._apply(torch.clone)
    assert cache.counters.tiles == 1
    both.clear()
    del one
    gc.collect()
    assert counted(cache) == {"misses": 2, "dropped": 2}


def test_room_is_what_fits_without_pushing_out() -> None:
    cache, (a, b, c) = TileCache(2 * WHOLE), weights(3)
    assert cache.has_room(a, torch.float32)
    use(cache, a)
    use(cache, b)
    assert cache.has_room(a, torch.float32)  # it is there
    assert not cache.has_room(c, torch.float32)
    assert not TileCache().has_room(a, torch.float32)
    assert not TileCache(WHOLE - 1).has_room(a, torch.float32)
    assert TileCache(WHOLE).has_room(a, torch.float32)
    assert counted(cache) == {"misses": 2, "tiles": 2, "nbytes": 2 * WHOLE}  # asking is not using
    full = TileCache(WHOLE)
    assert full.pin(a, torch.float32) is not None
    assert full.has_room(a, torch.float32)
    assert not full.has_room(b, torch.float32)


def test_counters_can_be_reset_and_the_cache_cleared() -> None:
    cache, (a,) = TileCache(WHOLE), weights(1)
    use(cache, a)
    cache.reset_counters()
    assert counted(cache) == {"tiles": 1, "nbytes": WHOLE}
    cache.clear()
    assert counted(cache) == {"dropped": 1}
    assert cache.counters.hit_rate is None


def test_a_copied_model_shares_the_budget() -> None:
    cache = TileCache(1)
    assert copy.deepcopy(cache) is cache


@pytest.mark.parametrize(("budget", "tile"), [(-1, 1), (0, 0)])
def test_sizes_that_make_no_sense_are_refused(budget: int, tile: int) -> None:
    with pytest.raises(StoreError, match="budget"):
        TileCache(budget, tile_bytes=tile)


def test_threads_share_a_cache_without_losing_count() -> None:
    cache, many = TileCache(2 * WHOLE), weights(4)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(50):
            one = many[(seed + turn * 3) % 4]
            if not torch.equal(use(cache, one), decode(one.encoded)):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = cache.counters
    assert wrong == []
    assert result.hits + result.misses == 200
    assert result.nbytes == result.tiles * WHOLE <= 2 * WHOLE


def test_a_saved_cache_comes_back_empty_and_shared() -> None:
    cache, (weight,) = TileCache(2 * WHOLE, tile_bytes=WHOLE), weights(1)
    use(cache, weight)
    first, second = pickle.loads(pickle.dumps((cache, cache)))
    assert first is second
    assert (first.budget_bytes, first.tile_bytes, counted(first)) == (2 * WHOLE, WHOLE, {})


@pytest.mark.parametrize("budget", ["64MB", 1e6, None])
def test_a_budget_is_an_integer(budget) -> None:
    with pytest.raises(StoreError, match="as integers, got"):
        TileCache(budget)
