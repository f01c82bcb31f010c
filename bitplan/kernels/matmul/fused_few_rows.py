"""Matrix products over packed weights on the GPU: x [M, K] times W [N, K], W read once, as it is stored.

    out_MN = fused_matmul(x_MK, weight, arranged, bias)         arranged = arrange_scales(weight), once per weight
    out_PN = fused_experts(x, weight_ENK, arranged, routing)    every pair (token, expert) of a layer in one launch

x and out are bfloat16. Codes become bfloat16 in registers and meet x in the tensor cores; sums are float32. Where a
code times its scale is a bfloat16 (mxfp4, nvfp4) or is rounded to one as `decode` does (int4_g32, q4_0_gguf), the
product equals `decode` then `F.linear` but for the order of the float32 sums; the other formats are scaled in
float32 after the sum over a block, which rounds less than `decode` does.

The floor, and how it is approached (H200, mxfp4, M = 1): 0.53 bytes a weight over 4.2 TB/s leave 4.2 lane slots of the
integer pipe (64 lanes an SM) a weight at full speed. The decoder of `decode_words` takes 1.25; tensor cores keep
multiplications off the lanes. Split-K gives enough programs, and the last to finish adds up the others. The kernel is
in `few_rows_kernel`. Up to 8 rows `direct` is faster, which needs neither shared memory nor split-K; more than 64 rows
go to `fused_many_rows`.

Legend: N outputs, K inputs, M rows of x, E experts, P pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.formats.codec import decode, encode
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.registry import get_format
from bitplan.kernels.base.launch import PreparedLaunch
from bitplan.kernels.base.numbers import INTERPRETED
from bitplan.kernels.matmul.direct.products import direct_pointers, prepare_direct
from bitplan.kernels.matmul.expert_routing import WIDEST_TILE, Routing
from bitplan.kernels.matmul.few_rows_kernel import few_rows_kernel
from bitplan.kernels.matmul.fused_choices import STEP, candidate_launches, default_launch
from bitplan.kernels.matmul.fused_many_rows import wide_matmul
from bitplan.kernels.matmul.fused_weights import (
    FUSED_FORMATS,
    WIDEST_STEP,
    ArrangedScales,
    MatmulLaunch,
    arrange_scales,
    can_overlap,
    join_scales,
    why_not_fused,
)

__all__ = [
    "FUSED_FORMATS",
    "ArrangedScales",
    "MatmulLaunch",
    "arrange_scales",
    "bind_matmul",
    "candidate_launches",
    "default_launch",
    "fused_experts",
    "fused_matmul",
    "join_scales",
    "why_not_fused",
]


def fused_matmul(
    x: Tensor,
    weight: Encoded,
    arranged: ArrangedScales,
    bias: Tensor | None = None,
    launch: MatmulLaunch | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K], plus bias [N]."""
    _check(x, weight, bias)
    rows = x.shape[0]
    out = torch.empty((rows, weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return out
    launch = launch or default_launch(weight, rows)
    if launch.direct:
        how = prepare_direct(x.device, weight, arranged, _name_of(bias), rows, launch)
        how(x, out, *direct_pointers(weight, arranged, bias))
        return out
    if launch.rows > WIDEST_TILE:
        wide_matmul(x, weight, arranged, bias, out, launch)
        return out
    tiles = triton.cdiv(rows, launch.rows)
    _launch(x, weight, arranged, bias, out, launch, tiles, None, per_pair=True)
    return out


def fused_experts(
    x: Tensor,
    weight: Encoded,
    arranged: ArrangedScales,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    per_pair: bool = False,
    launch: MatmulLaunch | None = None,
) -> Tensor:
    """Row p of the result is x[p // top_k] (or x[p] with `per_pair`) times the weight [N, K] of pair p's expert."""
    _check(x, weight, bias)
    pairs = routing.pairs
    expected = pairs if per_pair else pairs // routing.top_k
    if x.shape[0] != expected:
        raise FormatError(f"{pairs} pairs of {routing.top_k} experts a token take {expected} rows, got {x.shape[0]}")
    out = torch.empty((pairs, weight.shape[-2]), dtype=torch.bfloat16, device=x.device)
    if pairs == 0:
        return out
    launch = launch or default_experts_launch(routing)
    _launch(x, weight, arranged, bias, out, launch, routing.tile_expert.shape[0], routing, per_pair=per_pair)
    return out


def default_experts_launch(routing: Routing) -> MatmulLaunch:
    """Two slices, for an expert's matrix has few inputs, and a step of four would leave a loop of six steps."""
    return MatmulLaunch(64 if routing.rows <= 16 else 32, routing.rows, STEP, 2, 1, 2, 3, overlap=1)


def words_for(fmt: Format, launch: MatmulLaunch, device: torch.device) -> str:
    """Which decoder a launch uses, see `decode_words`: the faster one where it was tried and found right."""
    if INTERPRETED or torch.version.hip is not None:
        return "none"
    if fmt.name not in ("mxfp4", "nvfp4", "fp4_u8_g128", "int4_g32"):
        return "0123"
    key = (fmt.name, replace(launch, split=1, overlap=0), device)
    if key not in _order_holds:
        if torch.cuda.is_current_stream_capturing():  # nothing can be tried out in here
            return "0123"
        _order_holds[key] = _try_order(*key)
    return "0213" if _order_holds[key] else "0123"


_order_holds: dict[tuple[str, MatmulLaunch, torch.device], bool] = {}


def _try_order(format_name: str, launch: MatmulLaunch, device: torch.device) -> bool:
    """Whether the faster decoder gives the right product on one tile, four steps of every code."""
    fmt = get_format(format_name)
    shape = (launch.outputs, 4 * launch.step * launch.slices)
    count = torch.arange(math.prod(shape), device=device)
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)[count * 7 % 8]
    weight = encode((values * torch.where(count * 5 % 3 == 0, -0.125, 0.25)).reshape(shape), fmt)
    x = torch.randn((launch.rows, shape[1]), generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    out = torch.empty((launch.rows, launch.outputs), dtype=torch.bfloat16, device=device)
    _launch(x, weight, arrange_scales(weight), None, out, launch, 1, None, per_pair=True, words="0213")
    expected = x.double() @ decode(weight, torch.float64).T
    return bool(((out - expected).norm() <= 0.01 * expected.norm()).item())


def _check(x: Tensor, weight: Encoded, bias: Tensor | None) -> None:
    reason = why_not_fused(weight, x.dtype)
    if reason is not None:
        raise FormatError(f"{reason}; use strategy 'decode' or 'auto'")
    if x.dim() != 2 or x.shape[1] != weight.shape[-1] or not x.is_contiguous():
        raise FormatError(f"inputs must be contiguous [rows, {weight.shape[-1]}], got {tuple(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise FormatError(f"the bias must have shape {weight.shape[:-1]}, got {tuple(bias.shape)}")


def _launch(
    x: Tensor,
    weight: Encoded,
    arranged: ArrangedScales,
    bias: Tensor | None,
    out: Tensor,
    launch: MatmulLaunch,
    tiles: int,
    routing: Routing | None,
    *,
    per_pair: bool,
    words: str | None = None,
) -> None:
    kind = _name_of(bias)
    how = _prepare(
        x.device, weight, arranged, kind, out.shape[0], launch, tiles, routing, per_pair=per_pair, words=words
    )
    split = how.grid[2]
    shape = (split, out.shape[0], weight.shape[-2])
    partial = torch.empty(shape, dtype=torch.float32, device=x.device) if split > 1 else arranged.counters
    how(x, out, partial, *_weight_pointers(weight, arranged, bias), *_routing_pointers(arranged, routing))


def bind_matmul(
    x: Tensor, weight: Encoded, arranged: ArrangedScales, bias: Tensor | None, launch: MatmulLaunch
) -> tuple[Callable[..., None], int] | None:
    """What launches this product for other x of this shape, and its split; None where it was not launched before.

    It takes the stream and the addresses of x, of the result and, where the split is not 1, of room for the parts.
    """
    rows = x.shape[0]
    if launch.direct and not INTERPRETED:
        how = prepare_direct(x.device, weight, arranged, _name_of(bias), rows, launch)
        straight = how.bind(x.get_device(), *direct_pointers(weight, arranged, bias))
        return None if straight is None else (functools.partial(_without_parts, straight), 1)
    if launch.rows > WIDEST_TILE or INTERPRETED:
        return None
    tiles = triton.cdiv(rows, launch.rows)
    how = _prepare(x.device, weight, arranged, _name_of(bias), rows, launch, tiles, None, per_pair=True)
    bound = how.bind(x.get_device(), *_weight_pointers(weight, arranged, bias), *_routing_pointers(arranged, None))
    return None if bound is None else (bound, how.grid[2])


def _without_parts(launch: Callable[..., None], stream: int, x: int, out: int, _: int) -> None:
    launch(stream, x, out)


def _weight_pointers(weight: Encoded, arranged: ArrangedScales, bias: Tensor | None) -> tuple[Tensor, ...]:
    unread = arranged.counters  # a pointer that is not read
    given = unread if bias is None else bias.contiguous()
    return weight.data, arranged.scales, arranged.factor, given, arranged.counters


def _routing_pointers(arranged: ArrangedScales, routing: Routing | None) -> tuple[Tensor, ...]:
    unread = (arranged.counters,) * 3
    if routing is None:
        return (arranged.counters, *unread)
    return (routing.tile_expert, *(routing.order or unread))


def _name_of(bias: Tensor | None) -> str:
    return "none" if bias is None else {torch.bfloat16: "bf16", torch.float32: "f32"}[bias.dtype]


def _prepare(
    device: torch.device,
    weight: Encoded,
    arranged: ArrangedScales,
    bias: str,
    rows: int,
    launch: MatmulLaunch,
    tiles: int,
    routing: Routing | None,
    *,
    per_pair: bool,
    words: str | None = None,
) -> PreparedLaunch:
    """All of a launch but its pointers."""
    blocks = triton.cdiv(weight.shape[-2], launch.outputs)
    split = launch.split if blocks * tiles <= arranged.counters.shape[0] else 1
    return _prepared(
        weight.fmt.name,
        weight.shape[-2:],
        launch,
        (blocks, tiles, split),
        rows,
        bias,
        "no" if routing is None else "as they come" if routing.order is None else "sorted",
        None if routing is None else routing.tile_expert.dtype,
        1 if per_pair or routing is None else routing.top_k,
        weight.shape[0] if routing is not None else 1,
        arranged.scales.shape[1] if arranged.scales.dim() == 4 else 0,
        arranged.kind(weight.fmt),
        arranged.factor.dim() == 1,
        words or words_for(weight.fmt, launch, device),
        can_overlap(device),
        device,
    )


@functools.lru_cache(4096)
def _prepared(
    format_name: str,
    shape: tuple[int, int],
    launch: MatmulLaunch,
    grid: tuple[int, int, int],
    rows: int,
    bias: str,
    grouped: str,
    of_experts: torch.dtype | None,  # noqa: ARG001 (a launch is for tensors of one type, on one device)
    pairs_a_row: int,
    experts: int,
    quads: int,
    scale: str,
    factors: bool,
    words: str,
    overlaps: bool,
    device: torch.device,  # noqa: ARG001 (as above)
) -> PreparedLaunch:
    fmt, (outputs, inputs) = get_format(format_name), shape
    assert fmt.element is not None
    order = fmt.packing.order if fmt.packing is not None else "bytes"
    group = fmt.block.cols or 0
    if launch.step % STEP or launch.step * launch.slices > WIDEST_STEP or (group == 128 and launch.step != 128):
        raise FormatError(f"{fmt.name}: {launch.slices} slices of {launch.step} inputs do not fit blocks of {group}")
    overlap = launch.overlap == 1 and overlaps
    constants = {
        "N": outputs,
        "K": inputs,
        "ELEMENT": fmt.element.name,
        "SCALE": scale,
        "ORDER": order,
        "NIBBLES": fmt.packing is not None,
        "GROUP": group,
        "FACTORS": factors,
        "BIAS": bias,
        "GROUPED": grouped,
        "PAIRS_A_ROW": pairs_a_row,
        "EXPERTS": experts,
        "QUADS_OF_ROW": quads,
        "SLICES": launch.slices,
        "BN": launch.outputs,
        "BM": launch.rows,
        "BK": launch.step,
        "SPLIT": grid[2],
        "STAGES": launch.stages,
        "WORDS": words,
        "OVERLAP": overlap,
    }
    options = {"num_warps": launch.warps, **({"launch_pdl": True} if overlap else {})}
    types = {0: torch.int32} if order == "low_first" else {}
    if scale == "e5m3":
        types[4] = torch.uint8
    return PreparedLaunch(few_rows_kernel, grid, (rows,), constants, types=types, **options)
