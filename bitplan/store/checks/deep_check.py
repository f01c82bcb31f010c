"""Checks a checkpoint's numbers: faults that `check_headers` cannot find, because they are in the data.

| code | what it says |
|---|---|
| norm-not-finite | a norm's weights hold NaN or infinity: every output of the model is NaN |
| not-finite | another tensor of floats, or a scale in a GGUF block, holds NaN or infinity |
| scale-base | a base factor that is not a finite number, or is below zero |
| scale-nan | scales that are NaN: E8M0 byte 255, E4M3's NaN, a float's |
| scale-saturated | scales at the end of their range: E8M0 byte 254, infinity, or many E4M3 448 or uint8 255 that clip |
| scale-underflow | scales that fell to zero, or nearly, under codes that are not zero |
| undefined-code | codes that stand for no number: NaN in 8-bit floats, ternary's fourth pattern |
| unwritten-code | -128 in GGUF's Q8_0, whose scale is max |x| / 127, so that its encoders never write it |

One pass, in pieces of 16 MiB. scale_findings.py says what is counted in packed tensors, and when.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitplan.errors import BitplanError
from bitplan.formats import get_format
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.plan.check import Finding
from bitplan.plan.manifest import Manifest, Tag
from bitplan.plan.names import natural_order
from bitplan.plan.roles import guess_role
from bitplan.store.checks.scale_findings import OnBytes, check_packed, index_of
from bitplan.store.files.gguf_tensors import GGUFTensors
from bitplan.store.files.packed_rows import (
    PackedTensor,
    base_fault,
    base_name,
    packed_pair,
    packed_tensor,
    plain_pieces,
    scales_name,
    spans,
)
from bitplan.store.files.safetensors_tensors import NativeTensors
from bitplan.store.files.tensor_file import TensorFile, TensorSpec


def deep_check(manifest: Manifest | None, file: TensorFile, *, on_bytes: OnBytes | None = None) -> list[Finding]:
    """All findings about the numbers of an open checkpoint, in natural order of names.

    The manifest says which tensors are norms, and which are codes and scales of a weight kept under two names; without
    a manifest, norms are recognised by name. `on_bytes(count, name)` is called as the pass goes on, with counts that
    add up to the file's tensors.
    """
    left = {name: spec.nbytes for name, spec in file.specs.items()}

    def done(count: int, name: str) -> None:
        count = min(count, left[name])  # the codes of a pair are read together with its scales
        left[name] -= count
        if on_bytes:
            on_bytes(count, name)

    findings = []
    for name in natural_order(file.specs):
        findings += _check_tensor(manifest, file, file.specs[name], done)
        done(left[name], name)
    return findings


def _check_tensor(manifest: Manifest | None, file: TensorFile, spec: TensorSpec, done: OnBytes) -> list[Finding]:
    tag = _tag(manifest, spec.name)
    if spec.format.startswith("gguf:"):
        return _check_gguf(file, spec, done)
    fmt = get_format(spec.format) if spec.encoded else None
    if isinstance(fmt, GgufBlocks):
        return _check_blocks(packed_tensor(file, spec.name), fmt, done)
    if fmt is not None and not fmt.is_cast:
        return check_packed(packed_tensor(file, spec.name), done)
    if manifest is not None and tag is not None and tag.part == "data" and isinstance(file, NativeTensors):
        pair = _pair(manifest, file, spec.name, tag)
        return check_packed(pair, done) if isinstance(pair, PackedTensor) else pair
    if tag is not None and tag.part == "scales":
        return []  # checked with their codes
    if spec.encoded or spec.dtype.is_floating_point or spec.dtype.is_complex:
        return _check_plain(manifest, file, spec, done)
    return []


# ---- plain numbers ---------------------------------------------------------------------------------------------------


def _check_plain(manifest: Manifest | None, file: TensorFile, spec: TensorSpec, done: OnBytes) -> list[Finding]:
    """Find NaN and infinity by aminmax, which propagates them at the speed of memory; count them only then."""
    if spec.dtype == torch.float4_e2m1fn_x2:
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


def _check_blocks(packed: PackedTensor, fmt: GgufBlocks, done: OnBytes) -> list[Finding]:
    """Check the float16 numbers in blocks that hold their own scales."""
    bad = count = 0
    for start, stop in packed.spans():
        numbers = fmt.stored_scales(packed.read(start, stop).data)
        done((stop - start) * packed.nbytes // packed.steps, packed.name)
        bad += int((~numbers.isfinite()).sum())
        count += numbers.numel()
    return _not_finite(packed.name, bad, f"{count} scales of {fmt.name}")


def _check_gguf(file: TensorFile, spec: TensorSpec, done: OnBytes) -> list[Finding]:
    """Check the decoded numbers of a type that bitplan can only decode."""
    from bitplan.store.files.gguf import dequantize_rows

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


def _tag(manifest: Manifest | None, name: str) -> Tag | None:
    match = None if manifest is None else manifest.match(name)
    return None if manifest is None or match is None else manifest.tag(match.rule.format)


def _role(manifest: Manifest | None, name: str) -> str:
    """The role in a plan; guessed from the name if no rule matches."""
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
