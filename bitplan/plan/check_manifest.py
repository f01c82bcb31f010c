"""Check a manifest against a checkpoint's header, before a byte of a weight is read.

Only names, dtypes, shapes and sizes are needed, so a checkpoint of any size takes a fraction of a second. Each
finding has a code, the place it is about, and a line that says what was expected, what was found and the next step:

| code | what it says |
|---|---|
| other-model | no tensor matches any rule |
| gpt-oss | a checkpoint that is no gpt-oss, or a config that contradicts it: what `load_packed` refuses too |
| unmatched | a tensor that no rule matches |
| unused-rule | a rule that matches nothing, and is not optional |
| shadowed-rule | a rule that only matches tensors which earlier rules take |
| overlap | two rules that match the same tensors and disagree; the first wins |
| size | bytes that are not those of the dtype and shape |
| dtype | a dtype that the format does not have |
| cast | another float dtype than the format's: `quantize` casts it, so only loaders mind |
| missing-scales, missing-data | half of a packed weight |
| swapped | data and scales under each other's names |
| block-count | scales x block is not the number of weights |
| block-size | the shapes give another block than the one declared |
| scale-base | codes and scales whose base is neither in the file nor a number in the manifest |
| nibble-parity | half a byte: a row of packed numbers that does not fill its last byte |
| padding | rows that are not whole blocks, where padding is "none" |
| fused-group | q/k/v, gate/up or the experts of a layer in different formats |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from bitplan.base.documents import short
from bitplan.base.errors import Finding, ManifestError, counted
from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES
from bitplan.formats.format import Format
from bitplan.plan.manifest import Manifest, Tag, needs_base, rule_text
from bitplan.plan.names import listed, natural_order
from bitplan.plan.plan import Part, part_dtype
from bitplan.plan.structure.families import row_of, split_expert
from bitplan.plan.structure.model_view import TensorSpec

CAST = "cast"
OTHER_MODEL = "other-model"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
# Torch's own name for E8M0 bytes.
_SAME_BYTES = {"float8_e8m0fnu": "uint8"}


# A tensor's entry in a file, or as much of it as is needed: a dtype's name or a format of ours, the shape, the bytes.
Headers = Mapping[str, TensorSpec | tuple[str, tuple[int, ...], int]]


def check_headers(manifest: Manifest, headers: Headers) -> list[Finding]:
    """Return all findings, in an order that depends on the content only; none means clean."""
    tensors = {name: _as_spec(headers[name]) for name in natural_order(headers)}
    matches = {name: manifest.matches(name) for name in tensors}
    if tensors and not any(matches.values()):
        message = (
            f"none of {len(tensors)} tensors matches any of {len(manifest.rules)} rules, so the manifest is for "
            f"another model; the tensors begin with {listed(tensors, 3)}"
        )
        return [Finding(OTHER_MODEL, manifest.where, message)]
    tags = {name: manifest.tag(manifest.rules[indices[0]].format) for name, indices in matches.items() if indices}
    return [
        *_unmatched(tensors, matches),
        *_rule_findings(manifest, matches),
        *_overlaps(manifest, matches),
        *(finding for name in tags for finding in _tensor(manifest, name, tensors[name], tags[name])),
        *_halves(tensors, tags),
        *_bases(manifest, tensors, tags),
        *_fused_groups(tags),
    ]


def _as_spec(header: TensorSpec | tuple[str, tuple[int, ...], int]) -> TensorSpec:
    if isinstance(header, TensorSpec):
        return header
    fmt, shape, nbytes = header
    return TensorSpec("", tuple(shape), fmt, format=fmt, nbytes=nbytes)


def require_clean(manifest: Manifest, headers: Headers, *, checkpoint: str) -> None:
    """Raise one line that names file, rule and tensor if there are findings."""
    findings = check_headers(manifest, headers)
    if findings:
        first = findings[0]
        match = manifest.match(first.where) if first.where in headers else None
        rule = f" ({rule_text(match.index, match.rule)})" if match else ""
        more = f"; {counted(len(findings) - 1, 'more finding')}, all in `bitplan verify`" if len(findings) > 1 else ""
        raise ManifestError(
            f"{manifest.where} does not fit {checkpoint}: {first.code}: "
            f"{short(first.where)}{rule}: {first.message}{more}"
        )


# ---- rules -----------------------------------------------------------------------------------------------------------


def _unmatched(tensors: Mapping[str, TensorSpec], matches: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    for name, indices in matches.items():
        if not indices:
            shape = tensors[name].shape
            yield Finding("unmatched", name, f"no rule matches (shape {shape}); add a rule, or a final '.*' rule")


def _rule_findings(manifest: Manifest, matches: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    winners = {indices[0] for indices in matches.values() if indices}
    takers: dict[int, list[int]] = {}  # rule -> for each tensor that it matches, the rule that wins
    for indices in matches.values():
        for index in indices:
            takers.setdefault(index, []).append(indices[0])
    for index, rule in enumerate(manifest.rules):
        if index in winners or _is_default(manifest, index):
            continue
        where = rule_text(index, rule)
        if index in takers:
            first = natural_order(rule_text(i, manifest.rules[i]) for i in set(takers[index]))
            message = f"never used: earlier rules take all {len(takers[index])} tensors it matches ({listed(first, 3)})"
            yield Finding("shadowed-rule", where, f"{message}; move it up, or delete it")
        elif not rule.optional:
            yield Finding("unused-rule", where, 'matches no tensor; correct it, or mark it "optional": true')


def _is_default(manifest: Manifest, index: int) -> bool:
    """Whether this is a final rule for everything: it may match tensors of earlier rules, or have no tensor left."""
    is_last = index == len(manifest.rules) - 1
    return is_last and index > 0 and manifest.rules[index].pattern.removeprefix("^").removesuffix("$") in (".*", ".+")


def _overlaps(manifest: Manifest, matches: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    pairs: dict[tuple[int, int], list[str]] = {}
    tags = [manifest.tag(rule.format) for rule in manifest.rules]
    layouts = [(tag.format, tag.part) for tag in tags]
    last = len(tags) - 1 if _is_default(manifest, len(tags) - 1) else None
    for name, indices in matches.items():
        for later in indices[1:]:
            if later != last and layouts[indices[0]] != layouts[later]:
                pairs.setdefault((indices[0], later), []).append(name)
    for (winner, later), names in sorted(pairs.items()):
        one, two = manifest.rules[winner], manifest.rules[later]
        yield Finding(
            "overlap",
            rule_text(later, two),
            f"gives {two.format} to {listed(names, 3)}, but {rule_text(winner, one)} comes first with {one.format}",
        )


# ---- one tensor ------------------------------------------------------------------------------------------------------


def _tensor(manifest: Manifest, name: str, header: TensorSpec, tag: Tag) -> Iterator[Finding]:
    fmt = get_format(tag.format)
    packed = header.format == fmt.name and not fmt.is_cast
    item_bytes = ITEM_BYTES.get(header.format)
    expected = fmt.nbytes(header.shape) if packed else item_bytes and item_bytes * math.prod(header.shape)
    if expected is not None and expected != header.nbytes:
        text = f"{header.format} of shape {header.shape} takes {expected} bytes, the file has {header.nbytes}"
        yield Finding("size", name, text)
    wrong = None if packed else _wrong_dtype(fmt, tag, header.format)
    if wrong:
        is_cast = tag.part is None and fmt.is_cast and fmt.name in _FLOATS and header.format in _FLOATS
        yield Finding(CAST if is_cast else "dtype", name, wrong)
    if tag.part is None and not packed and header.shape and not fmt.is_cast:
        yield from _rows(manifest, name, header.shape, fmt)


def _wrong_dtype(fmt: Format, tag: Tag, dtype: str) -> str | None:
    if tag.part is not None:
        expected = part_dtype(fmt, tag.part)
        if _SAME_BYTES.get(dtype, dtype) == expected:
            return None
        return f"the {tag.part} of {fmt.name} must be {expected}, the file has {dtype}"
    if fmt.is_cast:
        return None if dtype == fmt.name else f"must be {fmt.name}, the file has {dtype}"
    if dtype in _FLOATS:
        return None  # plain numbers, which are still to be encoded
    return f"to be encoded as {fmt.name} it must be one of {', '.join(_FLOATS)}, the file has {dtype}"


def _rows(manifest: Manifest, name: str, shape: tuple[int, ...], fmt: Format) -> Iterator[Finding]:
    """Rows that are still to be encoded must be whole bytes and whole blocks."""
    cols = fmt.matrix_shape(shape)[1]
    if manifest.padding != "none":
        return
    if fmt.packing and cols % fmt.packing.per_byte:
        text = f"{cols} numbers of {fmt.packing.bits} bits do not fill whole bytes"
        yield Finding("nibble-parity", name, f'{text}; declare padding "zero", or keep it in another format')
    elif fmt.padded_cols(cols) != cols:
        text = f"rows of {cols} are not whole blocks of {fmt.block.cols} ({fmt.name})"
        yield Finding("padding", name, f'{text}; declare padding "zero", or choose a block that divides {cols}')


# ---- codes and their scales ------------------------------------------------------------------------------------------


def _halves(tensors: Mapping[str, TensorSpec], tags: Mapping[str, Tag]) -> Iterator[Finding]:
    for name, tag in tags.items():
        if tag.part is None:
            continue
        names = _partners(name, tag.part)
        partner = next((other for other in names if other in tensors), None)
        missing = "scales" if tag.part == "data" else "data"
        if partner is None:
            text = f"({names[0]}) are not in the checkpoint" if names else "have no name that follows from its own"
            yield Finding(f"missing-{missing}", name, f"its {missing} {text}")
        elif partner not in tags or tags[partner].part != missing:
            yield Finding(f"missing-{missing}", name, f"its {missing}, {partner!r}, have no rule as {missing}")
        elif tags[partner].format != tag.format:
            text = f"is {tag.format}, but its {missing}, {partner!r}, are {tags[partner].format}"
            yield Finding(f"missing-{missing}", name, text)
        elif tag.part == "data":
            yield from _pair(name, tensors[name], tensors[partner], get_format(tag.format))


def base_names(data: str) -> tuple[str, ...]:
    """The names under which a file may hold the base of these codes' scales."""
    stem = data.removesuffix("blocks").rstrip("._")
    return f"{data}.base", f"{stem}.base", f"{stem}_base"


def _bases(manifest: Manifest, tensors: Mapping[str, TensorSpec], tags: Mapping[str, Tag]) -> Iterator[Finding]:
    if isinstance(manifest.scale_base, int | float):
        return
    for name, tag in tags.items():
        if tag.part == "data" and needs_base(tag.format) and not any(base in tensors for base in base_names(name)):
            text = f"scales of {tag.format} are multiples of a base, and there is no tensor {base_names(name)[0]!r}"
            yield Finding("scale-base", name, f"{text}; add it to the file, or give the number as scale_base")


def _partners(name: str, part: Part) -> list[str]:
    """Possible names of the other half: gpt-oss's `blocks` and `scales`, or bitplan's NAME and NAME.scales."""
    if part == "data":
        return [name.removesuffix("blocks") + "scales"] if name.endswith("blocks") else [f"{name}.scales"]
    if not name.endswith("scales"):
        return []
    base = [name.removesuffix(".scales")] if name.endswith(".scales") else []
    return [name.removesuffix("scales") + "blocks", *base]


def _pair(name: str, data: TensorSpec, scales: TensorSpec, fmt: Format) -> Iterator[Finding]:
    """Codes [..., blocks, bytes] or [..., bytes], scales [..., blocks]."""
    block, per_byte = fmt.block.cols or 1, fmt.packing.per_byte if fmt.packing else 1
    numbers, count = per_byte * math.prod(data.shape), math.prod(scales.shape)
    shapes = f"data {data.shape}, scales {scales.shape}"
    if numbers == block * count and _fits(data.shape, scales.shape, block // per_byte):
        return
    if count > math.prod(data.shape):
        yield Finding("swapped", name, f"there are more scales than data, so the two are swapped: {shapes}")
    elif count and numbers % count == 0 and numbers // count % per_byte:
        yield Finding("nibble-parity", name, f"{numbers // count} numbers to a scale is half a byte: {shapes}")
    elif count and numbers % count == 0 and _fits(data.shape, scales.shape, numbers // count // per_byte):
        text = f"the shapes give blocks of {numbers // count}, the manifest declares {block} ({fmt.name}): {shapes}"
        yield Finding("block-size", name, text)
    else:
        text = f"{count} scales x block {block} is {count * block} numbers, the data holds {numbers}: {shapes}"
        yield Finding("block-count", name, text)


def _fits(data: tuple[int, ...], scales: tuple[int, ...], block_bytes: int) -> bool:
    """Whether these data bytes are as many blocks as there are scales."""
    if data and data[:-1] == scales:
        return data[-1] == block_bytes
    return bool(data and scales) and data[:-1] == scales[:-1] and data[-1] == scales[-1] * block_bytes


# ---- groups that runtimes fuse ---------------------------------------------------------------------------------------


def _fused_groups(tags: Mapping[str, Tag]) -> Iterator[Finding]:
    """What runtimes compute as one and a manifest gives different formats: joined projections, a layer's experts."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, tag in tags.items():
        row, expert = row_of(name), split_expert(name)
        if row is not None and row.joined:
            key = ".".join(f"[{row.joined}]" if part in row.names else part for part in name.split("."))
            groups.setdefault((row.joined, key), {}).setdefault(tag.format, []).append(name)
        if expert is not None:
            key = f"{expert[0]}.[*].{expert[2]}"
            groups.setdefault(("experts", key), {}).setdefault(tag.format, []).append(name)
    for (kind, key), formats in groups.items():
        if len(formats) > 1:
            shown = "; ".join(f"{fmt}: {listed(names, 3)}" for fmt, names in formats.items())
            text = f"{kind} would get different formats, which runtimes that fuse them cannot load ({shown})"
            yield Finding("fused-group", key, text)
