"""Reads any file of weights into a dict on a device; packed tensors stay packed.

For models that are not gpt-oss's, and for those who bring their own modules: `bitplan quantize` writes such files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bitplan.base.devices import known_device
from bitplan.base.errors import FileFormatError
from bitplan.base.records import on_failure
from bitplan.files.deep_check import tag_of
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_rows import base_name, packed_pair, scales_name
from bitplan.files.tensor_file import TensorFile
from bitplan.formats import Encoded, get_format
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.plan import Header, Manifest, Tag, open_manifest, require_clean
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
    bad = int((~numbers.isfinite()).sum())
    if bad:
        raise FileFormatError(
            f"{file.path}: {name!r}: {bad} of {numbers.numel()} {what} are NaN or infinite; "
            "mend the checkpoint, or download it again"
        )


def _read_item(file: TensorFile, name: str, tag: Tag | None, rules: Manifest | None) -> Tensor | Encoded:
    if rules is None or tag is None or tag.part is None:
        item = file.read(name)
        return item.data if isinstance(item, Encoded) and item.fmt.is_cast else item
    base = base_name(file, name) if rules.scale_base == "tensor" else rules.scale_base
    factor = float(base) if isinstance(base, int) else base
    pair = packed_pair(file, name, scales_name(name), get_format(tag.format), factor)
    rows, layout = pair.read(0, pair.steps), pair.fmt.part_shapes(pair.shape)
    return Encoded(pair.fmt, pair.shape, **{part: own.reshape(layout[part][1]) for part, own in rows.parts.items()})
