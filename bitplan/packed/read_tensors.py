"""Reads any file of weights into a dict on a device; packed tensors stay packed.

For models that are not gpt-oss's, and for those who bring their own modules: `bitplan quantize` writes such files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.base.devices import known_device
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.optional import require
from bitplan.base.records import on_failure
from bitplan.base.text import counted
from bitplan.files.deep_check import deep_check, tag_of
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_rows import base_name, packed_pair, scales_name
from bitplan.files.tensor_file import TensorFile
from bitplan.formats import Encoded, get_format
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.plan import Header, Manifest, Tag, open_manifest, require_clean
from bitplan.plan.names import listed
from bitplan.plan.structure.families import guess_role

ManifestLike = Manifest | str | Path


def read_packed(
    path: str | Path, *, manifest: ManifestLike | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor | Encoded]:
    """Read every tensor of a file; packed ones come as Encoded.

    With a manifest, headers are checked first, codes and scales that are separate tensors in it (gpt-oss) come as one
    Encoded under the codes' name, and a tensor that it packs must be packed in the file. Tied names give the same
    object.
    """
    place = device_of(device)
    rules = None if manifest is None else as_manifest(manifest)
    tensors: dict[str, Tensor | Encoded] = {}
    with open_tensors(path) as file:
        if rules is not None:
            require_clean(rules, list_headers(file), checkpoint=str(path))
        tags = {name: tag_of(rules, name) for name in file.specs}
        for name, tag in tags.items():
            _refuse_expansion(file, name, tag)
        with on_failure(tensors.clear):  # the traceback keeps this frame, and would keep the memory
            for name, tag in tags.items():
                if tag is None or tag.part != "scales":  # scales are read with their codes
                    item = _read_item(file, name, tag, rules)
                    check_numbers(file, name, item)
                    tensors[name] = item.to(place)
        return tensors | {alias: tensors[name] for alias, name in file.tied.items()}


def as_manifest(manifest: ManifestLike) -> Manifest:
    return manifest if isinstance(manifest, Manifest) else open_manifest(manifest)


def list_headers(file: TensorFile) -> dict[str, Header]:
    """The headers of a file, as a manifest checks them."""
    return {name: Header(spec.format, spec.shape, spec.nbytes) for name, spec in file.specs.items()}


def device_of(device: torch.device | str) -> torch.device:
    """The device, with its index; a device that does not exist is an error, before anything is read."""
    place = known_device(device, "load to the CPU")
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def require_transformers(where: str) -> None:
    """Raise one line where transformers is missing or too old; `read_packed` gives the tensors without it."""
    require("transformers", purpose=f"{where}: running it", extra="models", least=5)


def check_room(where: str, needed: int, device: torch.device) -> None:
    """Refuse a model that the GPU has no memory for, before anything is read."""
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        raise StoreError(f"{where}: takes {needed} bytes, and {device} has {free} free; nothing was read")


def refuse_bad_numbers(file: TensorFile, rules: Manifest | None = None) -> None:
    """The check of `bitplan check --deep`; its error names the first finding and counts the others."""
    findings = deep_check(rules, file)
    if findings:
        first = findings[0]
        more = f" (and {counted(len(findings) - 1, 'more finding')})" if len(findings) > 1 else ""
        raise FileFormatError(f"{file.path}: {first.where}: {first.message}{more}")


def _refuse_expansion(file: TensorFile, name: str, tag: Tag | None) -> None:
    spec = file.specs[name]
    if spec.format.startswith("gguf:"):
        raise FileFormatError(
            f"{file.path}: {name!r} is {spec.format.removeprefix('gguf:')}, which bitplan does not hold packed; "
            "decode it to a file first with `bitplan quantize`"
        )
    if tag is not None and tag.part is None and not get_format(tag.format).is_cast and spec.format != tag.format:
        raise FileFormatError(
            f"{file.path}: {name!r} is {spec.format}, and the manifest packs it as {tag.format}; "
            "pack it with `bitplan quantize` first"
        )


def check_numbers(file: TensorFile, name: str, item: Tensor | Encoded) -> None:
    """Refuse NaN and infinity in scales and norms: these are few, and a bad one spoils all that it multiplies."""
    if isinstance(item, Encoded) and item.fmt.scales is not None and item.scales is not None:
        numbers, what = item.fmt.scales.load(item.scales, item.base), f"scales of {item.fmt.name}"
    elif isinstance(item, Encoded) and isinstance(item.fmt, GgufBlocks):
        numbers, what = item.fmt.stored_scales(item.data), f"scales of {item.fmt.name}"
    elif isinstance(item, Tensor) and item.is_floating_point() and guess_role(name) == "norm":
        numbers, what = (item.float() if item.itemsize == 1 else item), "numbers of a norm"
    else:
        return
    refuse_not_finite(str(file.path), name, numbers, what)


def refuse_not_finite(where: str, name: str, numbers: Tensor, what: str) -> None:
    bad = int((~numbers.isfinite()).sum())
    if bad:
        raise FileFormatError(
            f"{where}: {name!r}: {bad} of {numbers.numel()} {what} are NaN or infinite; "
            "mend the checkpoint, or download it again"
        )


def check_held(where: str, name: str, numbers: Tensor, dtype: torch.dtype, whose: str) -> None:
    """Refuse numbers that `dtype` cannot hold; `whose` type it is, for the message."""
    if torch.promote_types(numbers.dtype, dtype) == dtype:
        return
    lost = int(((numbers.to(dtype).to(numbers.dtype) != numbers) & ~numbers.isnan()).sum())
    if lost:
        raise FileFormatError(
            f"{where}: {name!r} is {numbers.dtype}, and {lost} of {numbers.numel()} numbers do not fit {dtype}, "
            f"{whose}; pass dtype={numbers.dtype} to keep them, or dtype={dtype} to round them"
        )


def check_filled(model: nn.Module, where: str) -> None:
    """Raise if a tensor was left on meta."""
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise StoreError(
            f"{where}: {len(left)} tensors were not loaded, and are still on the meta device: {listed(left)}"
        )


def check_norms(file: TensorFile) -> None:
    """`check_numbers` of the plain norms alone, for a caller that lets transformers read them."""
    for name, spec in file.specs.items():
        if guess_role(name) == "norm" and (not spec.encoded or get_format(spec.format).is_cast):
            item = file.read(name)
            check_numbers(file, name, item.data if isinstance(item, Encoded) else item)


def _read_item(file: TensorFile, name: str, tag: Tag | None, rules: Manifest | None) -> Tensor | Encoded:
    if rules is None or tag is None or tag.part is None:
        item = file.read(name)
        return item.data if isinstance(item, Encoded) and item.fmt.is_cast else item
    base = base_name(file, name) if rules.scale_base == "tensor" else rules.scale_base
    factor = float(base) if isinstance(base, int) else base
    pair = packed_pair(file, name, scales_name(name), get_format(tag.format), factor)
    rows, layout = pair.read(0, pair.steps), pair.fmt.part_shapes(pair.shape)
    return Encoded(pair.fmt, pair.shape, **{part: own.reshape(layout[part][1]) for part, own in rows.parts.items()})


CHECKS = ("headers", "deep")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: bytes of the file and on the device, and the peak of memory there while loading.

    `peak_bytes` is the peak of torch's allocator minus what was allocated before; None on a CPU, where nothing counts.
    """

    path: str
    layout: str
    device: str
    file_bytes: int
    device_bytes: int
    packed_bytes: int
    packed_tensors: int
    plain_tensors: int
    seconds: float
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Loaded(NamedTuple):
    """A model that runs, and the report of loading it."""

    model: nn.Module
    report: LoadReport


class PeakMemory:
    """The most that was allocated on a GPU since this object was made; making it resets torch's own peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def read(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._before
