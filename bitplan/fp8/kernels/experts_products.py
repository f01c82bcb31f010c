"""FP8 for experts: tokens sorted by expert, every expert's matrix, and the three products, without asking the host.

    layout = lay_out(tokens_per_expert, rows, pad)       which expert has which rows; stays on the device
    x_rows, x_cols = cast_tokens(x_TK, recipe, layout)   for products that sum along K, and along tokens
    w_rows, w_cols = cast_experts(w_ENK, recipe)         for the forward, and for the input gradient
    y_TN = grouped_rows(x_rows, w_rows, layout)          each row times its expert's matrix
    dw_ENK = grouped_sums(dy_cols, x_cols, layout)       for each expert the sum over its own rows

Every expert is a tensor of its own: scales never reach across experts, so a result does not depend on the other
experts, nor on the number of processes that share them. Scales come as

    kind      recipe                     tokens: rows, cols          matrices: rows, cols            pad
    "vector"  tensorwise, rowwise        [T], [E, K]                 [E, N], [E, K]                  16 or 128
    "block"   blockwise                  [K / 128, T], [P / 128, K]  [E, N / 128, K / 128], its T    128

where a tensorwise scale is repeated for each row (`GroupedFp8.uniform`). Rows keep their places in `rows`; in `cols`,
[K, P], each expert's rows start at a multiple of `pad` and are filled up with zeros; P is enough for the worst routing.

`impl`: "reference" is the definition, in plain torch, a loop over experts; "triton" our kernels for any GPU with FP8;
"gluon" our kernels for "vector" on compute capability 9, where the result is a multiple of 256 wide; "torch"
`torch._scaled_grouped_mm`, for E4M3 "vector" there. "auto" takes the reference on a CPU, and on a GPU the first that
can of gluon, torch and triton; `gluon_obstacle` says why it is not the first. `grouped_sums` of triton and gluon steps
by 128 tokens, so it takes a layout padded to 128.

With `fast_accum` sums stay in the tensor cores, which keep about 14 bits; without it they go to float32 after every
128 products.
"""

from __future__ import annotations

import functools
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import FP8_DTYPES, cast_reference, pad_rows, scale_of_amax, scaling_of
from bitplan.fp8.kernels.experts_layout import GLUON_COLS, TILE_ROWS, GroupedFp8, GroupLayout, scale_kind
from bitplan.fp8.kernels.product import capability_of
from bitplan.fp8.recipes import BLOCK, RECIPES

if TYPE_CHECKING:
    from bitplan.fp8.kernels.triton_product import GroupedLaunch

IMPLEMENTATIONS = ("auto", "reference", "triton", "gluon", "torch")


def token_pad(recipe: str, impl: str) -> int:
    """The multiple to which each expert's rows are padded where a product sums over them."""
    return 16 if scale_kind(recipe) == "vector" and impl == "torch" else BLOCK


def pick_impl(
    recipe: str,
    device: torch.device,
    fp8: str = "e4m3",
    impl: str = "auto",
    *,
    width: int | None = None,
    pad: int | None = None,
) -> str:
    """The implementation that "auto" means here; an error if the one asked for cannot run.

    `width` and `pad` as in `gluon_obstacle`.
    """
    if impl not in IMPLEMENTATIONS:
        raise FormatError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    by_torch = (
        device.type == "cuda" and fp8 == "e4m3" and scale_kind(recipe) == "vector" and capability_of(device)[0] == 9
    )
    if impl == "auto" and device.type != "cuda":
        return "reference"
    if impl in ("auto", "gluon"):
        obstacle = gluon_obstacle(recipe, device, width=width, pad=pad)
        if obstacle is None:
            return "gluon"
        if impl == "gluon":
            raise FormatError(f"the gluon product cannot do this: {obstacle}; use 'auto'")
        return "torch" if by_torch else "triton"
    if impl == "torch" and not by_torch:
        raise FormatError(
            f"torch's grouped FP8 product takes tensorwise or rowwise E4M3 on compute capability 9, got {recipe} "
            f"{fp8} on {device}; use 'triton'"
        )
    return impl


def gluon_obstacle(
    recipe: str, device: torch.device, *, width: int | None = None, pad: int | None = None
) -> str | None:
    """Why the gluon products cannot be used, or None. A size that is not given counts as fitting.

    `width`: the columns of the result (outputs for the forward, inputs for both gradients); `pad`: where tokens are
    summed, the padding of the layout.
    """
    if scale_kind(recipe) != "vector":
        return f"it takes scales of rows and columns (tensorwise, rowwise), got {recipe}"
    if device.type != "cuda" or capability_of(device)[0] != 9:
        return f"it runs on compute capability 9 (Hopper), got {device}"
    if width is not None and width % GLUON_COLS:
        return f"its result is a multiple of {GLUON_COLS} wide, got {width}"
    if pad is not None and pad % BLOCK:
        return f"it sums {BLOCK} tokens at once, got a layout padded to {pad}"
    return _gluon_lacks()


@functools.cache
def _gluon_lacks() -> str | None:
    """What the gluon products need and this version of Triton lacks, or None."""
    try:
        import triton
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper
    except ImportError as error:
        return f"no Gluon could be imported: {error}"
    if triton.knobs.runtime.interpret:
        return "Triton's interpreter has no Gluon"
    needed: dict[Any, tuple[str, ...]] = {
        language: ("NVMMADistributedLayout", "NVMMASharedLayout", "allocate_shared_memory", "split", "warp_specialize"),
        hopper: ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"),
    }
    missing = [name for where, names in needed.items() for name in names if not hasattr(where, name)]
    if not missing and "functions_and_args" not in inspect.signature(language.warp_specialize).parameters:
        missing = ["warp_specialize(functions_and_args, ...)"]  # it had another signature before 3.6
    return f"Triton {triton.__version__} has no {', '.join(missing)} in Gluon" if missing else None


# ---- layouts ---------------------------------------------------------------------------------------------------------


def lay_out(
    tokens_per_expert: Tensor, rows: int, pad: int, *, misrouted: Tensor | None = None, impl: str = "auto"
) -> GroupLayout:
    """Tables for this routing. `misrouted` (int32, one number) keeps the largest error of counts so far."""
    if tokens_per_expert.dim() != 1 or tokens_per_expert.dtype not in (torch.int32, torch.int64):
        raise FormatError(
            "tokens_per_expert must be int32 or int64 [experts], got "
            f"{tokens_per_expert.dtype} of shape {tuple(tokens_per_expert.shape)}"
        )
    experts = tokens_per_expert.shape[0]
    tiles = max(1, rows // TILE_ROWS + min(experts, rows))
    padded = max(pad, (rows + min(experts, rows) * (pad - 1)) // pad * pad)
    padded = -(-padded // BLOCK) * BLOCK  # a row of the transposed layout is whole blocks too
    if impl == "triton" or (impl == "auto" and tokens_per_expert.is_cuda):
        from bitplan.fp8.kernels.experts_general_cast import lay_out_groups

        ends, padded_ends, by_size, *tiled, used = lay_out_groups(
            tokens_per_expert.contiguous(), rows, pad, tiles, misrouted
        )
        return GroupLayout(ends, padded_ends, by_size, tiled[0], tiled[1], tiled[2], used, rows, padded, pad)
    return _layout_reference(tokens_per_expert, rows, pad, tiles, padded)


def _layout_reference(given: Tensor, rows: int, pad: int, tiles: int, padded: int) -> GroupLayout:
    counts = given.tolist()
    if min(counts, default=0) < 0 or sum(counts) != rows:
        raise FormatError(f"tokens_per_expert must add up to the {rows} rows of x, got {counts}")
    tile_expert, tile_row, tile_end, ends, padded_ends = [], [], [], [], []
    end = padded_end = 0
    for expert, count in enumerate(counts):
        for first in range(end, end + count, TILE_ROWS):
            tile_expert.append(expert)
            tile_row.append(first)
            tile_end.append(end + count)
        end, padded_end = end + count, padded_end + -(-count // pad) * pad
        ends.append(end)
        padded_ends.append(padded_end)
    free = tiles - len(tile_expert)
    by_size = sorted(range(len(counts)), key=lambda expert: -counts[expert])
    table = partial(torch.tensor, dtype=torch.int32, device=given.device)
    return GroupLayout(
        table(ends),
        table(padded_ends),
        table(by_size),
        table(tile_expert + [-1] * free),
        table(tile_row + [end] * free),
        table(tile_end + [end] * free),
        table([len(tile_expert)]),
        rows,
        padded,
        pad,
    )


# ---- casts -----------------------------------------------------------------------------------------------------------


def cast_tokens(
    x_TK: Tensor,
    recipe: str,
    layout: GroupLayout,
    fp8: str = "e4m3",
    eps: float = 0.0,
    *,
    rows: bool = True,
    cols: bool = True,
    impl: str = "auto",
    guess: Tensor | None = None,
) -> tuple[GroupedFp8 | None, GroupedFp8 | None]:
    """Tokens in the layouts asked for: [T, K] in the same order, and [K, P] padded per expert.

    `guess`: a state of `guessed_cast` for these experts, which saves a tensorwise cast of bfloat16 on the GPU its
    second read; any other cast leaves it alone.
    """
    kind = scale_kind(recipe)
    _check_width(x_TK.shape[1], recipe)
    if cols and kind == "block" and layout.pad % BLOCK:
        raise FormatError(f"blockwise sums over tokens by blocks of {BLOCK}, got a layout padded to {layout.pad}")
    if impl in ("triton", "gluon", "torch") or (impl == "auto" and x_TK.is_cuda):
        from bitplan.fp8.kernels.experts_general_cast import cast_token_tiles

        plain, turned = cast_token_tiles(x_TK, recipe, layout, fp8, eps, rows=rows, cols=cols, guess=guess)
        return _wrap(plain, recipe), _wrap(turned, recipe)
    return (
        _token_rows_reference(x_TK, recipe, layout, fp8, eps) if rows else None,
        _token_cols_reference(x_TK, recipe, layout, fp8, eps) if cols else None,
    )


def cast_experts(
    w_ENK: Tensor,
    recipe: str,
    eps: float = 0.0,
    *,
    rows: bool = True,
    cols: bool = True,
    impl: str = "auto",
    guess: Tensor | None = None,
) -> tuple[GroupedFp8 | None, GroupedFp8 | None]:
    """Matrices in the layouts asked for: [E, N, K], and transposed [E, K, N]; E4M3. `guess` as in `cast_tokens`."""
    scale_kind(recipe)  # refuses a recipe without grouped products
    for size in w_ENK.shape[1:]:
        _check_width(size, recipe)
    if impl in ("triton", "gluon", "torch") or (impl == "auto" and w_ENK.is_cuda):
        from bitplan.fp8.kernels.experts_general_cast import cast_expert_tiles

        plain, turned = cast_expert_tiles(w_ENK, recipe, eps, rows=rows, cols=cols, guess=guess)
        return _wrap(plain, recipe), _wrap(turned, recipe)
    return (
        _experts_reference(w_ENK, recipe, eps) if rows else None,
        _experts_reference(w_ENK.transpose(1, 2), recipe, eps) if cols else None,
    )


def _wrap(cast: tuple[Tensor, Tensor] | None, recipe: str) -> GroupedFp8 | None:
    return None if cast is None else GroupedFp8(*cast, scale_kind(recipe), uniform=RECIPES[recipe].has_one_scale)


def _check_width(size: int, recipe: str) -> None:
    multiple = RECIPES[recipe].multiple
    if size % multiple:
        raise FormatError(f"{recipe} takes sizes that are multiples of {multiple}, got {size}")


def _token_rows_reference(x_TK: Tensor, recipe: str, layout: GroupLayout, fp8: str, eps: float) -> GroupedFp8:
    rows, width = x_TK.shape
    codes = torch.empty((rows, width), dtype=FP8_DTYPES[fp8], device=x_TK.device)
    kind = scale_kind(recipe)
    scale = torch.empty((width // BLOCK, rows) if kind == "block" else (rows,), device=x_TK.device)
    for start, end in layout.spans():
        cast = cast_reference(x_TK[start:end], scaling_of(recipe), fp8, eps)
        codes[start:end] = cast.codes
        if kind == "block":
            scale[:, start:end] = cast.scale.t()
        else:
            scale[start:end] = cast.scale.view(-1)
    return GroupedFp8(codes, scale, kind, uniform=RECIPES[recipe].has_one_scale)


def _token_cols_reference(x_TK: Tensor, recipe: str, layout: GroupLayout, fp8: str, eps: float) -> GroupedFp8:
    width = x_TK.shape[1]
    codes = torch.zeros((width, layout.padded_rows), dtype=FP8_DTYPES[fp8], device=x_TK.device)
    kind = scale_kind(recipe)
    empty = scale_of_amax(torch.zeros(()), fp8).item()
    shape = (layout.padded_rows // BLOCK, width) if kind == "block" else (layout.experts, width)
    scale = torch.full(shape, empty, device=x_TK.device)
    at = 0
    for expert, (start, end) in enumerate(layout.spans()):
        padded = -(-(end - start) // layout.pad) * layout.pad
        if padded:
            cast = cast_reference(pad_rows(x_TK[start:end], padded).t(), scaling_of(recipe), fp8, eps)
            codes[:, at : at + padded] = cast.codes
            if kind == "block":
                scale[at // BLOCK : (at + padded) // BLOCK] = cast.scale.t()
            else:
                scale[expert] = cast.scale.view(-1)
        at += padded
    return GroupedFp8(codes, scale, kind, uniform=RECIPES[recipe].has_one_scale)


def _experts_reference(w_ENK: Tensor, recipe: str, eps: float) -> GroupedFp8:
    casts = [cast_reference(w_NK, scaling_of(recipe, is_weight=True), "e4m3", eps) for w_NK in w_ENK]
    codes = torch.stack([cast.codes for cast in casts])
    kind = scale_kind(recipe)
    if kind == "block":
        return GroupedFp8(codes, torch.stack([cast.scale for cast in casts]).contiguous(), kind)
    scale = torch.stack([cast.scale.view(-1).expand(w_ENK.shape[1]) for cast in casts])
    return GroupedFp8(codes, scale, kind, uniform=RECIPES[recipe].has_one_scale)


# ---- products --------------------------------------------------------------------------------------------------------


def grouped_rows(
    a_TK: GroupedFp8,
    b_ENK: GroupedFp8,
    layout: GroupLayout,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
    impl: str = "auto",
    launch: GroupedLaunch | None = None,
) -> Tensor:
    """Each row of a times its expert's matrix of b, transposed, plus that expert's bias [E, N]: [T, N]."""
    impl = _impl_of(a_TK, b_ENK, impl, b_ENK.codes.shape[1], None)
    shape = (a_TK.codes.shape[0], b_ENK.codes.shape[1])
    if not shape[0]:
        return torch.zeros(shape, dtype=out_dtype, device=a_TK.codes.device)
    if impl == "torch":
        out = torch._scaled_grouped_mm(
            a_TK.codes,
            b_ENK.codes.transpose(1, 2),
            a_TK.scale,
            b_ENK.scale,
            offs=layout.ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accum,
        )
        return add_expert_bias(out.to(out_dtype), bias, layout)
    out = torch.empty(shape, dtype=out_dtype, device=a_TK.codes.device)
    if impl == "triton":
        from bitplan.fp8.kernels.triton_product import rows_product

        rows_product(a_TK, b_ENK, layout, out, bias, fast_accum=fast_accum, launch=launch)
        return out
    if impl == "gluon":
        from bitplan.fp8.kernels import experts_hopper_products as hopper_products

        hopper_products.rows_product(a_TK, b_ENK, layout, out, bias, fast_accum=fast_accum)
        return out
    for expert, (start, end) in enumerate(layout.spans()):
        product = _decode_rows(a_TK, start, end) @ _decode_matrix(b_ENK, expert).t()
        out[start:end] = (product if bias is None else product + bias[expert].float()).to(out_dtype)
    return out


def grouped_sums(
    a_NP: GroupedFp8,
    b_KP: GroupedFp8,
    layout: GroupLayout,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool = True,
    impl: str = "auto",
    launch: GroupedLaunch | None = None,
) -> Tensor:
    """For each expert a times b transposed over its own tokens: [E, N, K]; zeros for an expert without tokens."""
    impl = _impl_of(a_NP, b_KP, impl, b_KP.codes.shape[0], layout.pad)
    if impl == "torch":
        return torch._scaled_grouped_mm(
            a_NP.codes,
            b_KP.codes.t(),
            a_NP.scale.view(-1),
            b_KP.scale.view(-1),
            offs=layout.padded_ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accum,
        ).to(out_dtype)
    shape = (layout.experts, a_NP.codes.shape[0], b_KP.codes.shape[0])
    out = torch.empty(shape, dtype=out_dtype, device=a_NP.codes.device)
    if impl == "triton":
        from bitplan.fp8.kernels.triton_product import sums_product

        if layout.pad % BLOCK:
            raise FormatError(f"the triton product sums {BLOCK} tokens at once, got a layout padded to {layout.pad}")
        sums_product(a_NP, b_KP, layout, out, fast_accum=fast_accum, launch=launch)
        return out
    if impl == "gluon":
        from bitplan.fp8.kernels import experts_hopper_products as hopper_products

        hopper_products.sums_product(a_NP, b_KP, layout, out, fast_accum=fast_accum)
        return out
    ends = layout.padded_ends.tolist()
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        product = _decode_cols(a_NP, expert, start, end) @ _decode_cols(b_KP, expert, start, end).t()
        out[expert] = product.to(out_dtype)
    return out


def add_expert_bias(out_TN: Tensor, bias: Tensor | None, layout: GroupLayout) -> Tensor:
    """Each row plus the bias [E, N] of its expert."""
    return out_TN if bias is None else out_TN + bias.to(out_TN.dtype)[expert_of_rows(layout)]


def expert_of_rows(layout: GroupLayout) -> Tensor:
    """The expert of every row [T]."""
    rows = torch.arange(layout.rows, dtype=torch.int32, device=layout.ends.device)
    return torch.searchsorted(layout.ends, rows, right=True).clamp(max=layout.experts - 1)


def _impl_of(a: GroupedFp8, b: GroupedFp8, impl: str, width: int, pad: int | None) -> str:
    if a.kind != b.kind:
        raise FormatError(f"a product takes scales of one kind, got {a.kind} and {b.kind}")
    both = "e4m3" if a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn else "e5m2"
    recipe = "blockwise" if a.kind == "block" else "rowwise"
    return pick_impl(recipe, a.codes.device, both, impl, width=width, pad=pad)


def _decode_rows(a_TK: GroupedFp8, start: int, end: int) -> Tensor:
    values = a_TK.codes[start:end].float()
    if a_TK.kind == "vector":
        return values * a_TK.scale[start:end, None]
    return values * a_TK.scale[:, start:end].t().repeat_interleave(BLOCK, 1)


def _decode_cols(a_NP: GroupedFp8, expert: int, start: int, end: int) -> Tensor:
    values = a_NP.codes[:, start:end].float()
    if a_NP.kind == "vector":
        return values * a_NP.scale[expert][:, None]
    return values * a_NP.scale[start // BLOCK : end // BLOCK].t().repeat_interleave(BLOCK, 1)


def _decode_matrix(b_ENK: GroupedFp8, expert: int) -> Tensor:
    values = b_ENK.codes[expert].float()
    if b_ENK.kind == "vector":
        return values * b_ENK.scale[expert][:, None]
    return values * b_ENK.scale[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
