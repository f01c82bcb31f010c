"""Which pairs of token and expert each program of a fused product takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIDEST_TILE = 32  # rows of x: the sums of 64 spill registers, and two tiles of 32 are faster


@dataclass(frozen=True)
class Routing:
    """Which pairs (token, expert) each program takes: pairs in order of expert, cut into tiles of one expert each.

    `tile_expert` is -1 for tiles that are not needed: their number depends on the data, and nobody waits for it. It is
    the number of experts for pairs whose id no expert has. Few pairs are not sorted: tile t is pair t, `tile_expert`
    the ids as they came, and there is no `order`.
    """

    tile_expert: Tensor
    order: tuple[Tensor, Tensor, Tensor] | None  # pairs by expert; of each tile the first in it, and how many
    pairs: int
    top_k: int
    rows: int


def route(expert_ids: Tensor, experts: int) -> Routing:
    """Pairs (token, slot) in order of expert, cut into tiles; on the GPU, without waiting for it.

    An id that no expert has gives NaN in its pair's row: an error would have to wait for the GPU. Tiles have room for
    twice the pairs of an average expert, for an expert in two tiles is decoded twice.
    """
    top_k = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    pairs = flat.shape[0]
    if pairs <= 16:  # a tile for each pair: nothing to launch here, and experts met twice are still in the cache
        return Routing(flat, None, pairs, top_k, 8)
    rows = tile_rows(2 * pairs // experts)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(flat, stable=True)
    groups = experts + 1  # the last for ids that no expert has
    count = torch.zeros(groups, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    tiles_of = (count + rows - 1) // rows
    ends = tiles_of.cumsum(0)
    tile = torch.arange(min(pairs, groups + pairs // rows), device=flat.device)  # the most there can be
    expert = torch.searchsorted(ends, tile, right=True)
    known = expert.clamp(max=experts)
    within = tile - (ends - tiles_of)[known]
    first = (count.cumsum(0) - count)[known] + within * rows
    left = (count[known] - within * rows).clamp(max=rows)
    expert = torch.where(expert < groups, expert, -1)
    return Routing(expert.int(), (order.int(), first.int(), left.int()), pairs, top_k, rows)


def tile_rows(rows: int) -> int:
    return 8 if rows <= 8 else min(WIDEST_TILE, 1 << (rows - 1).bit_length())
