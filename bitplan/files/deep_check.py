"""Checks a checkpoint's numbers: faults that `check_headers` cannot find, because they are in the data.

| code | what it says |
|---|---|
| checksum | the bytes of a tensor are not those that bitplan wrote |
| norm-not-finite | a norm's weights hold NaN or infinity: every output of the model is NaN |
| not-finite | another tensor of floats, or a scale in a GGUF block, holds NaN or infinity |
| scale-base | a base factor that is not a finite number, or is below zero |
| scale-nan | scales that are NaN: E8M0 byte 255, E4M3's NaN, a float's |
| scale-saturated | scales at the end of their range: E8M0 byte 254, infinity, or many E4M3 448 or uint8 255 that clip |
| scale-underflow | scales that fell to zero, or nearly, under codes that are not zero |
| undefined-code | codes that stand for no number: NaN in 8-bit floats, ternary's fourth pattern |

One pass, in pieces of 16 MiB. Codes are read only where they can be wrong (8-bit floats, ternary), or
where a scale lies at an end of its range: every nibble of E2M1 is a number, so for a gpt-oss expert the scales are
enough. Codes are counted only in pieces where something is wrong, so that a sound file is read at the speed of the
disk. `bitplan.formats.scale_checks` explains each count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.base.errors import BitplanError, Finding
from bitplan.files.gguf_tensors import GGUFTensors
from bitplan.files.packed_rows import (
    PackedTensor,
    base_fault,
    base_name,
    packed_pair,
    packed_tensor,
    plain_pieces,
    scales_name,
    spans,
)
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.tensor_file import TensorFile, TensorSpec
from bitplan.formats import Encoded, get_format
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.scale_checks import (
    all_scales_inside,
    any_undefined_code,
    block_flags,
    every_code_is_defined,
    scales_at_an_end,
)
from bitplan.formats.scale_rules import BasedScales, PowerOfTwoScales
from bitplan.plan.manifest import Manifest, Tag
from bitplan.plan.names import natural_order
from bitplan.plan.structure.families import guess_role

# If scales share a base, one of them is at the top by design, and by chance a few more.
MANY_BLOCKS, MANY_SHARE = 2, 0.01
OnBytes = Callable[[int, str], None]


@dataclass
class _Count:
    """How often something was found, and where first, counted in blocks."""

    count: int = 0
    first: int = 0

    def add(self, flags: Tensor, positions: Tensor) -> None:
        """Count the flags that are set; `positions` are the indices of these blocks among all blocks of the tensor."""
        count = int(flags.sum())
        if count and not self.count:
            self.first = int(positions[(flags.reshape(-1) != 0).int().argmax()])
        self.count += count


_FLAGS = ("nan", "saturated", "clipped", "underflowed", "undefined")  # of BlockFlags


def check_packed(packed: PackedTensor, done: OnBytes) -> list[Finding]:
    """Findings about one packed tensor; `done(bytes, name)` is called for every piece."""
    fmt, base, blocks = packed.fmt, None, 0
    assert fmt is not None
    counts = {name: _Count() for name in _FLAGS}
    read_scales = packed.read_scales if every_code_is_defined(fmt) else None
    blocks_per_step = math.prod(packed.grid) // max(packed.steps, 1)
    for start, stop in packed.spans():
        done((stop - start) * packed.nbytes // packed.steps, packed.name)
        blocks += (stop - start) * blocks_per_step
        if read_scales is not None:
            scales, base = read_scales(start, stop)
            if bool(all_scales_inside(fmt, scales, base)):
                continue
        encoded = packed.read(start, stop)
        base = encoded.base
        positions = range(start * blocks_per_step, stop * blocks_per_step)
        if not _is_sound(encoded):
            picked = _suspects(encoded)
            flags = block_flags(_blocks_at(encoded, picked))
            for name in _FLAGS:
                counts[name].add(getattr(flags, name), picked + positions.start)
    return list(_findings(packed, counts, blocks, base))


def _is_sound(encoded: Encoded) -> bool:
    assert encoded.scales is not None
    inside = all_scales_inside(encoded.fmt, encoded.scales, encoded.base)
    return bool(inside & ~any_undefined_code(encoded))


def _suspects(encoded: Encoded) -> Tensor:
    """Indices of blocks whose codes must be counted: their scale is at an end of its range, or codes are undefined."""
    assert encoded.scales is not None
    flags = scales_at_an_end(encoded.fmt, encoded.scales.reshape(-1), encoded.base) | any_undefined_code(encoded)
    by_rows = encoded.fmt.block.rows == 1
    return (flags if by_rows else flags.any().expand_as(flags)).nonzero().flatten()


def _blocks_at(encoded: Encoded, picked: Tensor) -> Encoded:
    """The picked blocks, each as a row of its own; all blocks if every block is picked."""
    fmt, scales = encoded.fmt, encoded.scales
    assert scales is not None
    if picked.numel() == scales.numel():
        return encoded
    width = fmt.block.cols or encoded.shape[-1]
    data = encoded.data.reshape(scales.numel(), fmt.data_cols(width))[picked]
    return Encoded(fmt, (len(picked), width), data, scales.reshape(-1, 1)[picked], encoded.base)


def _findings(
    packed: PackedTensor, counts: Mapping[str, _Count], blocks: int, base: Tensor | None
) -> Iterator[Finding]:
    fmt, name = packed.fmt, packed.name
    assert fmt is not None
    if base is not None and not bool(base.isfinite() & (base >= 0)):
        text = f"the base of its scales is {float(base)}; it must be a finite number, not below zero"
        yield Finding("scale-base", name, f"{text}: every weight is lost; encode it again")
        return

    def scales(code: str, counted: _Count, which: str, advice: str) -> Finding:
        text = f"{counted.count} of {blocks} scales of {fmt.name} are {which}"
        return Finding(code, name, f"{text}, the first at block {index_of(counted.first, packed.grid)}; {advice}")

    def codes(code: str, counted: _Count, which: str) -> Finding:
        text = f"{counted.count} codes of {fmt.name} {which}, the first in block {index_of(counted.first, packed.grid)}"
        return Finding(code, name, f"{text}; the bytes are damaged, or of another format")

    e8m0 = isinstance(fmt.scales, PowerOfTwoScales)
    if counts["nan"].count:
        which = "byte 255, NaN by OCP MX" if e8m0 else "NaN"
        yield scales(
            "scale-nan", counts["nan"], which, "these blocks hold no numbers: convert or download the file again"
        )
    if isinstance(fmt.scales, BasedScales):
        if counts["clipped"].count >= MANY_BLOCKS and counts["clipped"].count > MANY_SHARE * blocks:
            which = f"{fmt.scales.largest:.0f}, the largest, with half of their codes or more at the largest magnitude"
            advice = "the weights clip: encode them again, with a larger base"
            yield scales("scale-saturated", counts["clipped"], which, advice)
    elif counts["saturated"].count:
        which = "byte 254, the largest" if e8m0 else "infinite"
        advice = "the weights overflowed: scale them down and encode again"
        yield scales("scale-saturated", counts["saturated"], which, advice)
    if counts["underflowed"].count:
        which = "byte 0, the smallest" if e8m0 else "zero"
        if fmt.scales is not None and fmt.scales.dtype == torch.float16:
            which = "zero, or subnormal and off by half a step or more"
        advice = "scale the weights up, or encode in a format with wider scales"
        yield scales("scale-underflow", counts["underflowed"], f"{which}, over codes that are not zero", advice)
    if counts["undefined"].count:
        yield codes("undefined-code", counts["undefined"], "stand for no number")


def index_of(offset: int, shape: tuple[int, ...]) -> list[int]:
    """The index [i, j, ...] in a tensor of a position in its flattened numbers; [] for a scalar."""
    index: list[int] = []
    for size in reversed(shape):
        offset, at = divmod(offset, size)
        index.append(at)
    return index[::-1]


def deep_check(manifest: Manifest | None, file: TensorFile, *, on_bytes: OnBytes | None = None) -> list[Finding]:
    """All findings about the numbers of an open checkpoint, in natural order of names.

    The manifest says which tensors are norms, and which are codes and scales of a weight kept under two names; without
    a manifest, norms are recognised by name. `on_bytes(count, name)` is called as the pass goes on, with counts that
    add up to the file's tensors.
    """
    unread = {name: spec.nbytes for name, spec in file.specs.items()}

    def done(count: int, name: str) -> None:
        count = min(count, unread[name])  # the codes of a pair are read together with its scales
        unread[name] -= count
        if on_bytes:
            on_bytes(count, name)

    findings = []
    for name in natural_order(file.specs):
        findings += _check_tensor(manifest, file, file.specs[name], done)
        if damaged := file.damaged_parts(name):
            message = f"its {' and '.join(damaged)}: other bytes than were written; copy or write the file again"
            findings.append(Finding("checksum", name, message))
        done(unread[name], name)
    return findings


def _check_tensor(manifest: Manifest | None, file: TensorFile, spec: TensorSpec, done: OnBytes) -> list[Finding]:
    tag = tag_of(manifest, spec.name)
    if spec.format.startswith("gguf:"):
        return _check_gguf(file, spec, done)
    fmt = get_format(spec.format) if spec.encoded else None
    if isinstance(fmt, GgufBlocks):
        packed = packed_tensor(file, spec.name)
        # Check the float16 numbers in blocks that hold their own scales.
        bad = count = 0
        for start, stop in packed.spans():
            numbers = fmt.stored_scales(packed.read(start, stop).data)
            done((stop - start) * packed.nbytes // packed.steps, packed.name)
            bad += int((~numbers.isfinite()).sum())
            count += numbers.numel()
        return _not_finite(packed.name, bad, f"{count} scales of {fmt.name}")
    if fmt is not None and not fmt.is_cast:
        return check_packed(packed_tensor(file, spec.name), done)
    if manifest is not None and tag is not None and tag.part == "data" and isinstance(file, NativeTensors):
        pair = _pair(manifest, file, spec.name, tag)
        return check_packed(pair, done) if isinstance(pair, PackedTensor) else pair
    if tag is not None and tag.part == "scales":
        return []  # checked with their codes
    if spec.encoded or spec.torch_dtype.is_floating_point or spec.torch_dtype.is_complex:
        return _check_plain(manifest, file, spec, done)
    return []


# ---- plain numbers ---------------------------------------------------------------------------------------------------


def _check_plain(manifest: Manifest | None, file: TensorFile, spec: TensorSpec, done: OnBytes) -> list[Finding]:
    """Find NaN and infinity by aminmax, which propagates them at the speed of memory; count them only then."""
    if spec.torch_dtype == torch.float4_e2m1fn_x2:
        return []
    nan = infinite = 0
    first: tuple[int, float] | None = None
    for offset, piece in plain_pieces(file, spec.name):
        numbers = _comparable(piece).reshape(-1)
        done(piece.nbytes, spec.name)
        if not numbers.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(numbers)):
            continue
        nan += int(numbers.isnan().sum())
        infinite += int(numbers.isinf().sum())
        at = int((~numbers.isfinite()).int().argmax())
        first = first or (offset + at * piece.numel() // numbers.numel(), float(numbers[at]))
    if first is None:
        return []
    text = (
        f"{nan} NaN and {infinite} infinite of {math.prod(spec.shape)} numbers, "
        f"the first, {first[1]}, at {index_of(first[0], spec.shape)}"
    )
    if _role(manifest, spec.name) == "norm":
        return [Finding("norm-not-finite", spec.name, f"{text}; a norm's scales must be finite: mend the checkpoint")]
    return [Finding("not-finite", spec.name, f"{text}; mend the checkpoint, or download it again")]


def _comparable(piece: Tensor) -> Tensor:
    if piece.is_complex():
        return torch.view_as_real(piece)
    return piece.float() if piece.itemsize == 1 else piece


def _check_gguf(file: TensorFile, spec: TensorSpec, done: OnBytes) -> list[Finding]:
    """Check the decoded numbers of a type that bitplan can only decode."""
    from bitplan.files.gguf import dequantize_rows

    assert isinstance(file, GGUFTensors)
    entry, bad = file.file.tensors[spec.name], 0
    for start, stop in spans(math.prod(entry.raw_shape[:-1]), entry.nbytes):
        raw = file.file.read_raw_rows(spec.name, start, stop)
        done(raw.nbytes, spec.name)
        bad += int((~dequantize_rows(raw, entry.type).isfinite()).sum())
    return _not_finite(spec.name, bad, f"{math.prod(spec.shape)} decoded numbers of {entry.type.name}")


def _not_finite(name: str, bad: int, of_what: str) -> list[Finding]:
    if not bad:
        return []
    text = f"{bad} of {of_what} are NaN or infinite; convert or download the file again"
    return [Finding("not-finite", name, text)]


# ---- names, by the manifest ------------------------------------------------------------------------------------------


def tag_of(manifest: Manifest | None, name: str) -> Tag | None:
    """What a manifest says a tensor holds; None where no rule names it."""
    match = None if manifest is None else manifest.match(name)
    return None if manifest is None or match is None else manifest.tag(match.rule.format)


def _role(manifest: Manifest | None, name: str) -> str:
    """The role of a tensor by the manifest's rule; guessed from its name where no rule matches."""
    match = None if manifest is None else manifest.match(name)
    if manifest is None or match is None:
        return guess_role(name)
    roles = manifest.tag(match.rule.format).roles
    return match.rule.role or (roles[0] if len(roles) == 1 else guess_role(match.name))


def _pair(manifest: Manifest, file: TensorFile, name: str, tag: Tag) -> PackedTensor | list[Finding]:
    """The weight whose codes this tensor holds, or what is wrong with it; pairs that do not fit are header findings."""
    fmt = get_format(tag.format)
    base: float | str | None = None
    if fmt.scales is not None and fmt.scales.needs_base:
        base = base_name(file, name)
        if manifest.scale_base != "tensor" and manifest.scale_base is not None:
            base = float(manifest.scale_base)
        if base is None:
            return []  # the check of plain tensors reports it
        if isinstance(base, str) and (fault := base_fault(file, base)):
            return [Finding("scale-base", name, f"{fault}; encode it again")]
    try:
        return packed_pair(file, name, scales_name(name), fmt, base)
    except BitplanError:
        return []
