"""How a product with a packed weight is run: the strategies, and which one `auto` picks.

| strategy | what is done | memory beside the packed weight |
|---|---|---|
| eager | expanded once, at first use, and kept | the whole matrix in the compute type |
| fused | one kernel reads packed bytes | scales in the kernel's order; on an Arm CPU a packed copy of int4_g32 |
| tile_cache | pieces of rows are expanded and kept while they are used | the cache's budget, for all layers together |
| decode | expanded for the call, kept nowhere | none that stays; on a CPU a piece at a time |
| fp8 | both sides in E4M3, on a GPU's FP8 units (`products.fp8_rows`), for inputs in fp8_e4m3_row | none that stays |
| auto | the fastest of fused, decode, fp8 and tile_cache | as the one it picks; never eager |

Only `auto` chooses: a strategy asked for by name runs or raises. Every pick says why.

`auto` on CUDA goes by a measured record (`packed.crossover`); `warm_up` and torch.compile make it. Without one,
so that a model answers at once, up to 32 rows are fused and more are decoded: on an H200 the fused kernel loses to the
vendor's product on expanded weights from 64 rows on. What would be decoded runs in FP8 where it can.

`auto` on a CPU needs no record: the fused product (`cpu_fused`) where it has the format, else a cached tile where a
cache has room, else decode. On x86 it is exact up to float32's rounding; on Arm int4_g32 runs on torch's 4-bit kernel,
which rounds inputs to 8-bit integers, and `strategy="decode"` does not.

How a product is run is also written as text, a constant of a compiled graph, read once:

    1:fused outputs=32 rows=8;64:fused;*:decode

1 row: the fused kernel with this launch. Up to 64 rows: the fused kernel with its default launch. More: decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, float64, get_autocast_dtype, is_autocast_enabled
from torch.autograd import forward_ad

from bitplan.base.errors import ArgumentError, BitplanError, did_you_mean
from bitplan.formats import Encoded
from bitplan.packed.crossover import Pick, bucket_of, crossovers_of, pick
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.products.fp8_rows import why_inexact, why_not_fp8
from bitplan.packed.products.fused import FusedMatmul, Launch, fused_for
from bitplan.packed.tile_cache import TileCache

INPUTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STRATEGIES = ("auto", "eager", "fused", "tile_cache", "decode", "fp8")
FUSED_ROWS_UNMEASURED = 32
_DENSE = (torch.strided, torch.jagged)
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # the innermost of torch.func, or None
_VMAP = torch._C._functorch.TransformType.Vmap


class LayerError(BitplanError, RuntimeError):
    """A packed layer was asked for something it cannot do."""


def check_strategy(strategy: str, where: str) -> str:
    if strategy not in STRATEGIES:
        hint = did_you_mean(str(strategy), STRATEGIES)
        raise LayerError(f"{where}: no strategy {strategy!r}; there are {', '.join(STRATEGIES)}{hint}")
    return strategy


def check_packed(weight: object, where: str) -> None:
    """Refuse a weight of floats: how to encode it is the caller's choice."""
    if not isinstance(weight, Encoded | PackedWeight):
        raise LayerError(
            f"{where}: the weight must be an Encoded or a PackedWeight, got a {type(weight).__name__}; "
            "pack it first with bitplan.encode(weight, format)"
        )


def check_tensor(value: object, where: str, noun: str = "the input") -> None:
    """Refuse what is no dense tensor: text, lists, arrays of other libraries, sparse tensors."""
    if not isinstance(value, Tensor):
        raise LayerError(f"{where}: {noun} must be a torch.Tensor, got a {type(value).__name__}")
    if value.layout not in _DENSE:
        raise LayerError(f"{where}: {noun} must be a dense tensor, got {value.layout}; call to_dense() first")


def is_transformed() -> bool:
    """Whether tensors may carry more than their numbers, which a kernel would drop: tangents, axes of vmap."""
    return forward_ad._current_level >= 0 or _transform() is not None


def refuse_transforms(where: str) -> None:
    """Refuse transforms of torch.func for which there is no rule here; vmap has one."""
    functorch = torch._C._functorch
    other = [transform.key() for transform in functorch.get_interpreter_stack() or () if transform.key() != _VMAP]
    if other or forward_ad._current_level >= 0:
        named = f"torch.func.{other[0].name.lower()}" if other else "forward-mode derivatives"
        verb = "does" if other else "do"
        raise LayerError(
            f"{where}: {named} {verb} not go through packed layers; use backward or torch.autograd.grad on an input "
            "that requires a gradient; of torch.func vmap alone"
        )


def input_type(x: Tensor) -> torch.dtype:
    """The type in which a layer takes this input: autocast's where it is on, but for float64."""
    if is_autocast_enabled(x.device.type) and x.dtype != float64:
        return get_autocast_dtype(x.device.type)
    return x.dtype


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type in which a product is computed: on a CPU never a 16-bit type."""
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded: nothing may be measured, and nothing made now may be kept."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def choose(
    weight: PackedWeight,
    rows: int,
    dtype: torch.dtype,
    strategy: str,
    cache: TileCache | None,
    *,
    where: str,
    measure: bool = False,
    input: str | None = None,
) -> Pick:
    """The strategy for this many rows of this type, with its reason. `measure`: what has no record is measured now.

    input   the format that inputs are rounded to, if they are
    """
    fused = fused_for(weight.device.type, input)
    if strategy == "auto":
        return _auto(weight, rows, dtype, cache, fused, measure=measure, input=input)
    if strategy == "fp8" and (refused := why_no_fp8(weight, dtype, input)) is not None:
        raise _cannot_run(strategy, weight, where, refused)
    if strategy == "fused":
        reason = _why_not_fused(fused, weight, dtype)
        launch = None
        if reason is None and weight.device.type == "cuda":
            record = crossovers_of(weight.device).find(weight.fmt.name, *weight.shape)
            if record is not None:
                timing = record.at(rows)
                reason, launch = record.refused, timing.launch if timing.rows >= rows else None
        if reason is not None or fused is None:
            raise _cannot_run("fused", weight, where, reason)
        return Pick("fused", f"asked for: {fused.name}, which {fused.note(weight.encoded)}", launch)
    if strategy == "tile_cache":
        check_cache(weight.device, cache, where)
    return Pick(strategy, "asked for")


# ---- asked for by name -----------------------------------------------------------------------------------------------


def _cannot_run(strategy: str, weight: PackedWeight, where: str, reason: str | None) -> LayerError:
    return LayerError(
        f"{where}: strategy {strategy!r} cannot run for {weight.fmt.name} of shape {weight.shape} on {weight.device}: "
        f"{reason}; set strategy='auto', which picks another way where this one cannot run, or 'decode'"
    )


def check_cache(device: torch.device, cache: TileCache | None, where: str) -> None:
    """Refuse the strategy "tile_cache" where there is no room in a cache, or no tile may be kept."""
    if cache is None or not cache.budget_bytes:
        raise LayerError(
            f"{where}: strategy 'tile_cache' needs a cache with a budget, got {cache!r}; "
            "pass cache=TileCache(budget_bytes), the same one to all layers"
        )
    if is_capturing(device):
        raise LayerError(
            f"{where}: strategy 'tile_cache' cannot be recorded in a CUDA graph, for a tile may be evicted before the "
            "graph is replayed; set strategy='fused', 'decode' or 'eager'"
        )


# ---- auto ------------------------------------------------------------------------------------------------------------


def _auto(
    weight: PackedWeight,
    rows: int,
    dtype: torch.dtype,
    cache: TileCache | None,
    fused: FusedMatmul | None,
    *,
    measure: bool,
    input: str | None,
) -> Pick:
    capturing = is_capturing(weight.device)
    room = not capturing and cache is not None and cache.has_room(weight, compute_dtype(weight.device, dtype))
    why_not = _why_not_fused(fused, weight, dtype)
    if weight.device.type == "cpu" and why_not is None and fused is not None:
        return Pick("fused", f"{fused.name}, which {fused.note(weight.encoded)}")
    if why_not is not None or fused is None:
        return _unfused(room, f"not fused: {why_not}")
    table = crossovers_of(weight.device)
    plain = fused_for(weight.device.type)  # records are of inputs as they are, but for products in FP8
    in_fp8 = why_no_fp8(weight, dtype, input) is None
    if measure and not capturing and plain is not None:
        record = table.find_or_measure(weight.encoded, plain, rows, in_fp8=in_fp8)
    else:
        record = table.find(weight.fmt.name, *weight.shape)
    in_fp8 = in_fp8 and (weight.fmt.name, *weight.shape) not in table.wrong_in_fp8
    if record is not None and (record.refused or record.stopped or record.timings[-1].rows >= bucket_of(rows)):
        return pick(record, rows, room=room, in_fp8=in_fp8)
    why_never = table.why_never(weight.fmt.name, *weight.shape)
    why = why_never or ("a CUDA graph is being captured" if capturing else "not measured, which bitplan.warm_up does")
    if rows <= FUSED_ROWS_UNMEASURED:
        return Pick("fused", f"default for up to {FUSED_ROWS_UNMEASURED} rows: {why}")
    return _unfused(room, f"default for more than {FUSED_ROWS_UNMEASURED} rows: {why}", in_fp8=in_fp8)


def _unfused(room: bool, why: str, *, in_fp8: bool = False) -> Pick:
    if room:
        return Pick("tile_cache", f"{why}; the tile cache has room, which saves the decoding")
    return Pick("fp8" if in_fp8 else "decode", f"{why}; no room in a tile cache")


def why_no_fp8(weight: PackedWeight, dtype: torch.dtype, input: str | None) -> str | None:
    """Why the product cannot run in FP8; None if it can. A weight's numbers are looked at once."""
    refused = why_not_fp8(weight.encoded, dtype, input)
    if refused is not None or type(weight.data) is not Tensor:
        return refused or "the weight has no numbers yet"
    if is_capturing(weight.device):
        return weight.derived("inexact in FP8", lambda: "nobody may look at it while a graph is captured", keep=False)
    return weight.derived("inexact in FP8", lambda: why_inexact(weight.encoded))


def _why_not_fused(fused: FusedMatmul | None, weight: PackedWeight, dtype: torch.dtype) -> str | None:
    if fused is None:
        return f"there is no fused kernel for {weight.device.type}"
    return fused.why_not(weight.encoded, dtype)


# ---- as text, which is a constant of a compiled graph ----------------------------------------------------------------


class ProductWay(NamedTuple):
    """How a product runs: the strategy, the kernel's launch if one was chosen, and the format of rounded inputs."""

    strategy: str
    launch: Launch | None = None
    input: str | None = None


def text_of(picks: Iterable[tuple[int | None, Pick]], input: str | None = None) -> str:
    """Write picks as a text for compiled graphs: (most rows, pick) in rising order, None for any number."""
    parts = []
    for rows, picked in picks:
        launch = f" input={input}" if input else ""
        launch += "".join(f" {name}={value}" for name, value in (picked.launch or {}).items())
        parts.append(f"{'*' if rows is None else rows}:{picked.strategy}{launch}")
    return ";".join(parts)


def way_at(text: str, rows: int) -> ProductWay:
    """Read from a text that `text_of` wrote how a product of this many rows runs."""
    for most, way in _read(text):
        if most is None or rows <= most:
            return way
    raise ArgumentError(f"ways {text!r} say nothing of {rows} rows; the last one must be for any number, '*'")


@functools.lru_cache(4096)
def _read(text: str) -> tuple[tuple[int | None, ProductWay], ...]:
    return tuple(_read_one(part, text) for part in text.split(";"))


def _read_one(part: str, text: str) -> tuple[int | None, ProductWay]:
    try:
        rows, _, rest = part.partition(":")
        strategy, *pairs = rest.split()
        values = dict(pair.split("=") for pair in pairs)
        input = values.pop("input", None)
        launch = {name: int(value) for name, value in values.items()}
        return (None if rows == "*" else int(rows)), ProductWay(strategy, launch or None, input)
    except ValueError:
        raise ArgumentError(f"expected ROWS:STRATEGY NAME=NUMBER..., got {part!r} in the ways {text!r}") from None
