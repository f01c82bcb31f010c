"""One new token attends to keys and values on a GPU as they are held: codes are read, and no cache is decoded.

A layer's cache is memory with spare room (`JoinedRows`), so that a token is written behind the others and nothing is
copied. Three kernels run for a token: it is rounded and written; each program attends to a chunk of the tokens before,
for all heads that share their keys; the chunks are joined. How many tokens there are is read from memory, so launches
are prepared once and cost the host little.

transformers asks for attention by name: a model whose implementation is `ATTENTION` (as `rounded_kv.round_kv` sets it)
gets `attend` here. For more than one token at a time, for masks and keywords that the kernels do not know, keys and
values are decoded and torch attends, as with "sdpa".

Codes are multiplied in bfloat16 (they are exact there, groups' numbers are rounded), sums and softmax are float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import MeasureError
from bitplan.base.loops.launch import INTERPRETED, PreparedLaunch
from bitplan.formats.format import Format
from bitplan.formats.triton_codec import ENCODERS
from bitplan.formats.triton_encode import largest, largest_scale, round_byte, scale_of_limit
from bitplan.formats.triton_numbers import (
    element_name,
    float_name,
    float_of_bits,
    float_of_e4m3,
    flush_small,
    load_scale,
    magnitude_bits,
    narrow,
    reciprocal,
    round_bf16,
    round_to_integer,
    scale_name,
)
from bitplan.packed.kv_rows import TOKENS, PackedRows, room_for

ATTENTION = "bitplan_kv"
WIDTHS = (32, 64, 128, 256)  # of a head
PROGRAMS = 528  # four for each multiprocessor of an H200: chunks are cut until there are about as many
LEAST_CHUNK = 256
APPENDED = ("int8_row", "fp8_e4m3_row", "int4_g32")  # rounded by the kernel that writes them


def can_join(
    formats: tuple[Format | None, Format | None], width: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> bool:
    """Whether a layer's keys and values, rows of `width` numbers, can be attended to as they are held."""
    on_gpu = device.type == "cuda" or INTERPRETED.value
    is_exact = dtype == torch.bfloat16 or INTERPRETED.value  # numbers as they are: bfloat16 is multiplied
    return on_gpu and width in WIDTHS and all(is_exact if fmt is None else fmt.name in ENCODERS for fmt in formats)


@dataclass
class SharedCount:
    """How many tokens lie in front of the new one, in the device's memory, shared by the layers of a cache."""

    tensor: Tensor | None = None
    count: int = -1

    def on(self, device: torch.device, count: int) -> Tensor:
        if self.tensor is None or self.tensor.device != device:
            with torch.inference_mode(False):
                self.tensor, self.count = torch.full((1,), count, dtype=torch.int32, device=device), count
        if self.count != count:  # in its place: a CUDA graph reads it there
            self.tensor.fill_(count)
            self.count = count
        return self.tensor


@dataclass
class JoinedRows:
    """Keys and values of one layer, in memory with room for `capacity` tokens, of which `tokens` are there."""

    formats: tuple[Format | None, Format | None]  # None: numbers as they are
    width: int
    dtype: torch.dtype
    shared: SharedCount
    tokens: int = 0
    capacity: int = 0
    parts: list[dict[str, Tensor]] = field(default_factory=lambda: [{}, {}])
    append_launch: PreparedLaunch | None = None
    attend_launches: dict[tuple[int, float], Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedRows:
        """Rows of their own; launches belong to the memory that they were prepared for."""
        parts = [{name: part.clone() for name, part in of.items()} for of in self.parts]
        settings = (self.formats, self.width, self.dtype, copy.deepcopy(self.shared, memo), self.tokens, self.capacity)
        return JoinedRows(*settings, parts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle ask for
            raise AttributeError(name)
        raise MeasureError(
            f"a model's attention asked a cache of codes for its {name}: it was made for a model that reads codes; "
            "call round_kv(model, formats), or start with a new cache"
        )

    def rows(self, which: int) -> PackedRows:
        """The keys (0) or values (1) of the tokens so far, as PackedRows."""
        parts = {name: part[:, :, : self.tokens] for name, part in self.parts[which].items()}
        return PackedRows(self.formats[which], self.width, self.dtype, parts)

    def extend(self, which: int, rows: dict[str, Tensor], tokens: int) -> None:
        """Write encoded rows [batch, heads, new tokens, ...] behind those that are there; `tokens` is the new count."""
        part = rows["data"]
        if tokens > self.capacity:
            self._make_room(part.shape[0], part.shape[1], tokens, part.device)
        for name, new in rows.items():
            bits = self.parts[which][name][:, :, tokens - new.shape[2] : tokens].view(torch.uint8)
            bits.copy_(new.contiguous().view(torch.uint8))

    def _make_room(self, batch: int, heads: int, tokens: int, device: torch.device) -> None:
        """Allocate memory for these tokens and a sixteenth more, in whole tiles, and copy what is there."""
        capacity = room_for(tokens)
        for which, fmt in enumerate(self.formats):
            shapes = {"data": (self.width, self.dtype)}
            if fmt is not None:
                assert fmt.scales is not None
                scales = self.width // (fmt.block.cols or self.width)
                shapes = {"data": (fmt.data_cols(self.width), fmt.storage), "scales": (scales, fmt.scales.dtype)}
            grown = {}
            for name, (cols, dtype) in shapes.items():
                with torch.inference_mode(False):  # or only that mode could write to it
                    grown[name] = torch.empty(batch, heads, capacity, cols, dtype=dtype, device=device)
                if self.tokens:
                    old = self.parts[which][name][:, :, : self.tokens]
                    grown[name][:, :, : self.tokens].view(torch.uint8).copy_(old.view(torch.uint8))
            self.parts[which] = grown
        self.capacity, self.append_launch, self.attend_launches = capacity, None, {}

    def _pairs(self) -> list[Tensor]:
        """Codes and scales of the keys and of the values; numbers as they are have no scales, which no kernel reads."""
        return [part.get(name, part["data"]) for part in self.parts for name in ("data", "scales")]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Round one token's keys and values [batch, heads, 1, width] and write them."""
        batch, heads = keys.shape[:2]
        if self.tokens + 1 > self.capacity:
            self._make_room(batch, heads, self.tokens + 1, keys.device)
        before = self.shared.on(keys.device, self.tokens)
        if all(fmt is None or fmt.name in APPENDED for fmt in self.formats):
            if self.append_launch is None:
                self.append_launch = _append_launch(self, batch * heads, keys)
            self.append_launch(keys.contiguous(), values.contiguous(), *self._pairs(), before)
        else:
            for which, rows in enumerate((keys, values)):
                self.extend(which, encode_rows(rows, self.formats[which]), self.tokens + 1)
        self.tokens += 1

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend with one token's queries [batch, heads, 1, width] to all tokens; gives [batch, 1, heads, width]."""
        batch, heads, _, width = query.shape
        launches = None if mask is not None else self.attend_launches.get((heads, scaling))
        if launches is None:  # a mask has another width for every token
            launches = _attend_launches(self, query, scaling, mask)
            if mask is None:
                self.attend_launches[heads, scaling] = launches
        attend, join, chunks = launches
        rows = batch * heads
        partial = torch.empty(rows * chunks, width, dtype=torch.float32, device=query.device)
        stats = torch.empty(rows * chunks, 2, dtype=torch.float32, device=query.device)
        out = torch.empty(batch, 1, heads, width, dtype=query.dtype, device=query.device)
        count = self.shared.on(query.device, self.tokens - 1)
        bits = None if mask is None else mask.contiguous().view(torch.uint8)
        attend(query.contiguous(), *self._pairs(), count, partial, stats, bits)
        join(partial, stats, out)
        return out


def encode_rows(rows: Tensor, fmt: Format | None) -> dict[str, Tensor]:
    """The parts of rows [batch, heads, tokens, width] whose width is whole blocks, by the Triton encoders."""
    if fmt is None:
        return {"data": rows}
    lead = rows.shape[:-1]
    data, scales = ENCODERS[fmt.name](rows.reshape(-1, rows.shape[-1]).contiguous(), fmt)
    return {"data": data.reshape(*lead, data.shape[-1]), "scales": scales.reshape(*lead, scales.shape[-1])}


def _element(fmt: Format | None, like: Tensor) -> str:
    """What a kernel calls a format's numbers; those that are held as they are have the name of their type."""
    return float_name(like.dtype) if fmt is None else element_name(fmt, like.device)


def _append_launch(rows: JoinedRows, count: int, like: Tensor) -> PreparedLaunch:
    keys, values = rows.formats
    constants = {
        "WIDTH": rows.width,
        "K_ELEMENT": _element(keys, like),
        "V_ELEMENT": _element(values, like),
        "K_LARGEST": 0.0 if keys is None else largest(keys),
        "V_LARGEST": 0.0 if values is None else largest(values),
        "K_LARGEST_SCALE": 0.0 if keys is None else largest_scale(keys),
        "V_LARGEST_SCALE": 0.0 if values is None else largest_scale(values),
        "SOURCE": float_name(like.dtype),
    }
    return PreparedLaunch(_append_rows, (count, 2), (rows.capacity,), constants, num_warps=1, enable_fp_fusion=False)


def _attend_launches(rows: JoinedRows, query: Tensor, scaling: float, mask: Tensor | None) -> tuple[Any, Any, int]:
    """The launches (attend to chunks, join them) and how many chunks, for a cache of this capacity."""
    batch, heads = query.shape[:2]
    kv_heads = rows.parts[0]["data"].shape[1]
    chunks = max(1, min(-(-rows.capacity // LEAST_CHUNK), PROGRAMS // (batch * kv_heads)))
    chunk = -(-rows.capacity // chunks // TOKENS) * TOKENS
    chunks = -(-rows.capacity // chunk)
    shared = heads // kv_heads
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "SHARED": shared,
        "TALL": max(16, triton.next_power_of_2(shared)),
        "WIDTH": rows.width,
        "CHUNKS": chunks,
        "TOKENS": TOKENS,
        "MASKED": mask is not None,
        "SOURCE": float_name(query.dtype),
    }
    for letter, fmt in zip("KV", rows.formats, strict=True):
        constants |= {
            f"{letter}_ELEMENT": _element(fmt, query),
            f"{letter}_ORDER": "bytes" if fmt is None or fmt.packing is None else fmt.packing.order,
            f"{letter}_GROUP": -1 if fmt is None else fmt.block.cols or 0,
            f"{letter}_SCALE": "f32" if fmt is None else scale_name(fmt),
        }
    numbers = (rows.capacity, chunk, 0 if mask is None else mask.shape[-1], scaling * 1.4426950408889634)
    grid = (batch * kv_heads, chunks)
    attend = PreparedLaunch(_attend_chunk, grid, numbers, constants, num_warps=4, num_stages=2)
    joined = {"WIDTH": rows.width, "CHUNKS": chunks, "TALL": triton.next_power_of_2(chunks)}
    joined |= {"SOURCE": float_name(query.dtype)}
    return attend, PreparedLaunch(_join_chunks, (batch * heads,), (), joined, num_warps=4), chunks


@triton.jit
def _append_rows(
    keys_ptr,
    values_ptr,
    key_data_ptr,
    key_scales_ptr,
    value_data_ptr,
    value_scales_ptr,
    before_ptr,
    capacity,
    WIDTH: tl.constexpr,
    K_ELEMENT: tl.constexpr,
    V_ELEMENT: tl.constexpr,
    K_LARGEST: tl.constexpr,
    V_LARGEST: tl.constexpr,
    K_LARGEST_SCALE: tl.constexpr,
    V_LARGEST_SCALE: tl.constexpr,
    SOURCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = row * capacity + tl.load(before_ptr)
    if tl.program_id(1) == 0:
        _append_row(
            keys_ptr, key_data_ptr, key_scales_ptr, row, at, WIDTH, K_ELEMENT, K_LARGEST, K_LARGEST_SCALE, SOURCE
        )
    else:
        _append_row(
            values_ptr, value_data_ptr, value_scales_ptr, row, at, WIDTH, V_ELEMENT, V_LARGEST, V_LARGEST_SCALE, SOURCE
        )


@triton.jit
def _append_row(
    x_ptr,
    data_ptr,
    scales_ptr,
    row,
    at,
    WIDTH: tl.constexpr,
    ELEMENT: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    SOURCE: tl.constexpr,
):
    x_ptr += row * WIDTH
    if ELEMENT == "int4":  # groups of 32 with bfloat16 scales, neighbours in a byte, codes plus 8
        group_G = tl.arange(0, WIDTH // 32)
        byte_GB = group_G[:, None] * 16 + tl.arange(0, 16)[None, :]
        even_GB = float_of_bits(tl.load(x_ptr + 2 * byte_GB), SOURCE)
        odd_GB = float_of_bits(tl.load(x_ptr + 2 * byte_GB + 1), SOURCE)
        limit_G = tl.max(tl.maximum(magnitude_bits(even_GB), magnitude_bits(odd_GB)), axis=1)
        stored_G = round_bf16(flush_small(scale_of_limit(limit_G, LARGEST, LARGEST_SCALE)))
        inverse_GB = reciprocal(float_of_bits(stored_G, "bf16"))[:, None]
        code_GB = round_to_integer(even_GB * inverse_GB) + round_to_integer(odd_GB * inverse_GB) * 16 + 0x88
        tl.store(scales_ptr + at * (WIDTH // 32) + group_G, stored_G)
        tl.store(data_ptr + at * (WIDTH // 2) + byte_GB, code_GB.to(tl.uint8))
    elif ELEMENT == SOURCE:  # numbers as they are
        col_C = tl.arange(0, WIDTH)
        tl.store(data_ptr + at * WIDTH + col_C, tl.load(x_ptr + col_C))
    else:
        col_C = tl.arange(0, WIDTH)
        x_C = float_of_bits(tl.load(x_ptr + col_C), SOURCE)
        scale = flush_small(scale_of_limit(tl.max(magnitude_bits(x_C), axis=0), LARGEST, LARGEST_SCALE))
        tl.store(scales_ptr + at, scale)
        tl.store(data_ptr + at * WIDTH + col_C, round_byte(x_C * reciprocal(scale), ELEMENT))


@triton.jit
def _columns(PIECE: tl.constexpr, WIDTH: tl.constexpr, ORDER: tl.constexpr):
    """The numbers of a row that a piece of it holds: all, or those of the low (0) or the high (1) nibbles."""
    if ORDER == "bytes":
        col = tl.arange(0, WIDTH)
    elif ORDER == "low_first":
        col = tl.arange(0, WIDTH // 2) * 2 + PIECE
    else:  # numbers j and j + 16 of 32 share a byte
        byte = tl.arange(0, WIDTH // 2)
        col = byte // 16 * 32 + byte % 16 + 16 * PIECE
    return col


@triton.jit
def _tile(
    data_ptr,
    scales_ptr,
    token_T,
    ok_T,
    WIDTH: tl.constexpr,
    ELEMENT: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Rows of some tokens [T, C] times their groups' scales: whole (twice), or as low and high nibbles."""
    bytes_of_row: tl.constexpr = WIDTH if ORDER == "bytes" else WIDTH // 2
    byte_C = tl.arange(0, bytes_of_row)
    code_TC = tl.load(data_ptr + token_T[:, None] * bytes_of_row + byte_C[None, :], mask=ok_T[:, None], other=0)
    if ORDER != "bytes":
        low_TC = ((code_TC & 15).to(tl.int32) - 8).to(tl.float32)
        high_TC = ((code_TC >> 4).to(tl.int32) - 8).to(tl.float32)
    else:
        if ELEMENT == "int8" or ELEMENT == "int8_half_away":
            low_TC = code_TC.to(tl.float32)
        elif GROUP < 0:
            low_TC = float_of_bits(code_TC, ELEMENT)
        else:
            low_TC = float_of_e4m3(code_TC, ELEMENT)
        high_TC = low_TC
    if GROUP > 0:
        bytes_of_group: tl.constexpr = GROUP if ORDER == "bytes" else GROUP // 2
        at_TC = token_T[:, None] * (WIDTH // GROUP) + (byte_C // bytes_of_group)[None, :]
        scale_TC = load_scale(tl.load(scales_ptr + at_TC, mask=ok_T[:, None], other=0), 1.0, SCALE)
        low_TC *= scale_TC
        high_TC *= scale_TC
    if not INTERPRETED:
        low_TC = low_TC.to(tl.bfloat16)
        high_TC = high_TC.to(tl.bfloat16)
    return low_TC, high_TC


@triton.jit
def _attend_chunk(
    query_ptr,
    key_data_ptr,
    key_scales_ptr,
    value_data_ptr,
    value_scales_ptr,
    before_ptr,
    partial_ptr,
    stats_ptr,
    mask_ptr,
    capacity,
    chunk,
    mask_stride,
    scaling,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    TALL: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    SOURCE: tl.constexpr,
    K_ELEMENT: tl.constexpr,
    K_ORDER: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_ELEMENT: tl.constexpr,
    V_ORDER: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_SCALE: tl.constexpr,
):
    pair = tl.program_id(0)
    batch = pair // KV_HEADS
    which = tl.program_id(1)
    tokens = tl.load(before_ptr) + 1
    first = which * chunk
    last = tl.minimum(first + chunk, tokens)
    row_H = tl.arange(0, TALL)
    ok_H = row_H < SHARED
    head_H = batch * HEADS + pair % KV_HEADS * SHARED + row_H
    k_nibbles: tl.constexpr = K_ORDER != "bytes"
    v_nibbles: tl.constexpr = V_ORDER != "bytes"
    k_width: tl.constexpr = WIDTH // 2 if k_nibbles else WIDTH
    v_width: tl.constexpr = WIDTH // 2 if v_nibbles else WIDTH
    query_ptr += head_H[:, None] * WIDTH
    q0_HC = float_of_bits(
        tl.load(query_ptr + _columns(0, WIDTH, K_ORDER)[None, :], mask=ok_H[:, None], other=0), SOURCE
    )
    q1_HC = q0_HC
    if k_nibbles:
        at_C = _columns(1, WIDTH, K_ORDER)
        q1_HC = float_of_bits(tl.load(query_ptr + at_C[None, :], mask=ok_H[:, None], other=0), SOURCE)
    if not INTERPRETED:
        q0_HC = q0_HC.to(tl.bfloat16)
        q1_HC = q1_HC.to(tl.bfloat16)
    key_data_ptr += pair.to(tl.int64) * capacity * k_width
    value_data_ptr += pair.to(tl.int64) * capacity * v_width
    key_scales_ptr += pair.to(tl.int64) * capacity * (WIDTH // K_GROUP if K_GROUP > 0 else 1)
    value_scales_ptr += pair.to(tl.int64) * capacity * (WIDTH // V_GROUP if V_GROUP > 0 else 1)
    top_H = tl.full([TALL], -1.0e30, tl.float32)
    sum_H = tl.zeros([TALL], tl.float32)
    out0_HC = tl.zeros([TALL, v_width], tl.float32)
    out1_HC = out0_HC
    for start in range(first, last, TOKENS):
        token_T = start + tl.arange(0, TOKENS)
        ok_T = token_T < last
        low_TC, high_TC = _tile(
            key_data_ptr, key_scales_ptr, token_T, ok_T, WIDTH, K_ELEMENT, K_ORDER, K_GROUP, K_SCALE
        )
        score_HT = tl.dot(q0_HC, tl.trans(low_TC))
        if k_nibbles:
            score_HT += tl.dot(q1_HC, tl.trans(high_TC))
        if K_GROUP == 0:
            score_HT *= tl.load(key_scales_ptr + token_T, mask=ok_T, other=0.0)[None, :]
        seen_T = ok_T
        if MASKED:
            seen_T = ok_T & (tl.load(mask_ptr + batch.to(tl.int64) * mask_stride + token_T, mask=ok_T, other=0) != 0)
        score_HT = tl.where(seen_T[None, :], score_HT * scaling, -1.0e30)
        higher_H = tl.maximum(top_H, tl.max(score_HT, axis=1))
        weight_HT = tl.where(seen_T[None, :], tl.exp2(score_HT - higher_H[:, None]), 0.0)
        shrink_H = tl.exp2(top_H - higher_H)
        sum_H = sum_H * shrink_H + tl.sum(weight_HT, axis=1)
        top_H = higher_H
        if V_GROUP == 0:
            weight_HT *= tl.load(value_scales_ptr + token_T, mask=ok_T, other=0.0)[None, :]
        if not INTERPRETED:
            weight_HT = weight_HT.to(tl.bfloat16)
        low_TC, high_TC = _tile(
            value_data_ptr, value_scales_ptr, token_T, ok_T, WIDTH, V_ELEMENT, V_ORDER, V_GROUP, V_SCALE
        )
        out0_HC = out0_HC * shrink_H[:, None] + tl.dot(weight_HT, low_TC)
        if v_nibbles:
            out1_HC = out1_HC * shrink_H[:, None] + tl.dot(weight_HT, high_TC)
    at_H = head_H.to(tl.int64) * CHUNKS + which
    tl.store(stats_ptr + at_H * 2, top_H, mask=ok_H)
    tl.store(stats_ptr + at_H * 2 + 1, sum_H, mask=ok_H)
    at_HC = at_H[:, None] * WIDTH + _columns(0, WIDTH, V_ORDER)[None, :]
    tl.store(partial_ptr + at_HC, out0_HC, mask=ok_H[:, None])
    if v_nibbles:
        at_HC = at_H[:, None] * WIDTH + _columns(1, WIDTH, V_ORDER)[None, :]
        tl.store(partial_ptr + at_HC, out1_HC, mask=ok_H[:, None])


@triton.jit
def _join_chunks(
    partial_ptr,
    stats_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    TALL: tl.constexpr,
    SOURCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk_S = tl.arange(0, TALL)
    ok_S = chunk_S < CHUNKS
    col_C = tl.arange(0, WIDTH)
    top_S = tl.load(stats_ptr + (row * CHUNKS + chunk_S) * 2, mask=ok_S, other=-1.0e30)
    sum_S = tl.load(stats_ptr + (row * CHUNKS + chunk_S) * 2 + 1, mask=ok_S, other=0.0)
    weight_S = tl.exp2(top_S - tl.max(top_S, axis=0))
    at_SC = (row * CHUNKS + chunk_S)[:, None] * WIDTH + col_C[None, :]
    part_SC = tl.load(partial_ptr + at_SC, mask=ok_S[:, None], other=0.0)
    total_C = tl.sum(part_SC * weight_S[:, None], axis=0)
    tl.store(out_ptr + row * WIDTH + col_C, narrow(total_C / tl.sum(sum_S * weight_S, axis=0), SOURCE))


def attend(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls: reads codes where a layer gave its cache itself, else as "sdpa" does."""
    sdpa = _sdpa()
    if isinstance(key, JoinedRows):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
        is_row = attention_mask is None or (
            attention_mask.dtype == torch.bool and attention_mask.shape == (query.shape[0], 1, 1, key.tokens)
        )
        if is_row and not unknown:
            return key.attend(query, attention_mask, scale), None
        key, value = key.rows(0).numbers(), key.rows(1).numbers()
    result: tuple[Tensor, None] = sdpa(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
    )
    return result


@functools.cache
def _sdpa() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"]


@functools.cache
def register() -> None:
    """Register our attention with transformers under the name `ATTENTION`; later calls do nothing."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, _mask)


def _mask(*sizes: Any, **options: Any) -> Tensor | None:
    """The mask of "sdpa"; none for one token that sees all before, also where a CUDA graph is being recorded."""
    from transformers.masking_utils import sdpa_mask

    sees_all = options.get("attention_mask") is None and options.get("local_size") is None
    if options.get("q_length") == 1 and sees_all and options.get("allow_is_causal_skip"):
        return None
    mask: Tensor | None = sdpa_mask(*sizes, **options)
    return mask
