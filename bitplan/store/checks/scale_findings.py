"""Findings about the scales and codes of a packed tensor, in one pass over its pieces.

Codes are read only where they can be wrong (8-bit floats, ternary, -128 in Q8_0), or where a scale lies at an end of
its range: every nibble of E2M1 is a number, so for a gpt-oss expert the scales are enough. Codes are counted only in
pieces where something is wrong, so that a sound file is read at the speed of the disk. `bitplan.formats.scales.checks`
explains each count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitplan.formats import Encoded
from bitplan.formats.scales.checks import (
    BlockFlags,
    all_scales_inside,
    any_undefined_code,
    block_flags,
    every_code_is_defined,
    scales_at_an_end,
)
from bitplan.formats.scales.rules import BasedScales, PowerOfTwoScales
from bitplan.plan.check import Finding
from bitplan.store.files.packed_rows import PackedTensor

# If scales share a base, one of them is at the top by design, and by chance a few more.
MANY_BLOCKS, MANY_SHARE = 2, 0.01
# Every encoder of Q8_0 takes the scale max |x| / 127.
NEVER_WRITTEN = {"q8_0_gguf": -128}
OnBytes = Callable[[int, str], None]


@dataclass
class _Count:
    """How often something was found, and where first, counted in blocks."""

    count: int = 0
    first: int = 0

    def add(self, flags: Tensor, places: Tensor) -> None:
        """Add flags or counts of some blocks, whose indices among all blocks are `places`."""
        count = int(flags.sum())
        if count and not self.count:
            self.first = int(places[(flags.reshape(-1) != 0).int().argmax()])
        self.count += count


@dataclass
class _Counts:
    blocks: int = 0
    nan: _Count = field(default_factory=_Count)
    saturated: _Count = field(default_factory=_Count)
    clipped: _Count = field(default_factory=_Count)
    underflowed: _Count = field(default_factory=_Count)
    undefined: _Count = field(default_factory=_Count)
    unwritten: _Count = field(default_factory=_Count)

    def add(self, flags: BlockFlags, places: Tensor) -> None:
        for name in ("nan", "saturated", "clipped", "underflowed", "undefined"):
            getattr(self, name).add(getattr(flags, name), places)


def check_packed(packed: PackedTensor, done: OnBytes) -> list[Finding]:
    """Findings about one packed tensor; `done(bytes, name)` is called for every piece."""
    fmt, counts, base = packed.fmt, _Counts(), None
    read_scales = packed.read_scales if every_code_is_defined(fmt) and fmt.name not in NEVER_WRITTEN else None
    blocks_per_step = math.prod(packed.grid) // max(packed.steps, 1)
    for start, stop in packed.spans():
        done((stop - start) * packed.nbytes // packed.steps, packed.name)
        counts.blocks += (stop - start) * blocks_per_step
        if read_scales is not None:
            scales, base = read_scales(start, stop)
            if bool(all_scales_inside(fmt, scales, base)):
                continue
        encoded = packed.read(start, stop)
        base = encoded.base
        places = range(start * blocks_per_step, stop * blocks_per_step)
        if not _is_sound(encoded):
            picked = _suspects(encoded)
            counts.add(block_flags(_take_blocks(encoded, picked)), picked + places.start)
        never = NEVER_WRITTEN.get(fmt.name)
        if never is not None and places and int(encoded.data.amin()) == never:
            per_block = (encoded.data.reshape(len(places), -1) == never).sum(dim=-1)
            counts.unwritten.add(per_block, torch.arange(places.start, places.stop))
    return list(_findings(packed, counts, base))


def _is_sound(encoded: Encoded) -> bool:
    assert encoded.scales is not None
    inside = all_scales_inside(encoded.fmt, encoded.scales, encoded.base)
    return bool(inside & ~any_undefined_code(encoded))


def _suspects(encoded: Encoded) -> Tensor:
    """The blocks whose codes must be counted: by their scales, or all where some code stands for no number."""
    assert encoded.scales is not None
    flags = scales_at_an_end(encoded.fmt, encoded.scales.reshape(-1), encoded.base) | any_undefined_code(encoded)
    by_rows = encoded.fmt.block.rows == 1
    return (flags if by_rows else flags.any().expand_as(flags)).nonzero().flatten()


def _take_blocks(encoded: Encoded, picked: Tensor) -> Encoded:
    """The picked blocks, each as a row of its own; all blocks if every block is picked."""
    fmt, scales = encoded.fmt, encoded.scales
    assert scales is not None
    if picked.numel() == scales.numel():
        return encoded
    width = fmt.block.cols or encoded.shape[-1]
    data = encoded.data.reshape(scales.numel(), fmt.data_cols(width))[picked]
    return Encoded(fmt, (len(picked), width), data, scales.reshape(-1, 1)[picked], encoded.base)


def _findings(packed: PackedTensor, counts: _Counts, base: Tensor | None) -> Iterator[Finding]:
    fmt, name = packed.fmt, packed.name
    if base is not None and not bool(base.isfinite() & (base >= 0)):
        text = f"the base of its scales is {float(base)}; it must be a finite number, not below zero"
        yield Finding("scale-base", name, f"{text}: every weight is lost; encode it again")
        return

    def scales(code: str, counted: _Count, which: str, advice: str) -> Finding:
        text = f"{counted.count} of {counts.blocks} scales of {fmt.name} are {which}"
        return Finding(code, name, f"{text}, the first at block {index_of(counted.first, packed.grid)}; {advice}")

    def codes(code: str, counted: _Count, which: str) -> Finding:
        text = f"{counted.count} codes of {fmt.name} {which}, the first in block {index_of(counted.first, packed.grid)}"
        return Finding(code, name, f"{text}; the bytes are damaged, or of another format")

    e8m0 = isinstance(fmt.scales, PowerOfTwoScales)
    if counts.nan.count:
        which = "byte 255, NaN by OCP MX" if e8m0 else "NaN"
        yield scales("scale-nan", counts.nan, which, "these blocks hold no numbers: convert or download the file again")
    if isinstance(fmt.scales, BasedScales):
        if _are_many(counts.clipped.count, counts.blocks):
            which = f"{fmt.scales.largest:.0f}, the largest, with half of their codes or more at the largest magnitude"
            advice = "the weights clip: encode them again, with a larger base"
            yield scales("scale-saturated", counts.clipped, which, advice)
    elif counts.saturated.count:
        which = "byte 254, the largest" if e8m0 else "infinite"
        advice = "the weights overflowed: scale them down and encode again"
        yield scales("scale-saturated", counts.saturated, which, advice)
    if counts.underflowed.count:
        which = "byte 0, the smallest" if e8m0 else "zero"
        if fmt.scales is not None and fmt.scales.dtype == torch.float16:
            which = "zero, or subnormal and off by half a step or more"
        advice = "scale the weights up, or encode in a format with wider scales"
        yield scales("scale-underflow", counts.underflowed, f"{which}, over codes that are not zero", advice)
    if counts.undefined.count:
        yield codes("undefined-code", counts.undefined, "stand for no number")
    if counts.unwritten.count:
        yield codes("unwritten-code", counts.unwritten, "are -128, which its encoders never write")


def _are_many(count: int, blocks: int) -> bool:
    return count >= MANY_BLOCKS and count > MANY_SHARE * blocks


def index_of(offset: int, shape: tuple[int, ...]) -> list[int]:
    """The index of a place in a flattened tensor; [] for a scalar."""
    index: list[int] = []
    for size in reversed(shape):
        offset, at = divmod(offset, size)
        index.append(at)
    return index[::-1]
