"""MLX folders, as mlx_lm writes them: words of codes in uint32, lowest bits first, with scales beside them.

| mode | parts of MODULE | comes as |
|---|---|---|
| affine, 2 to 6 and 8 bits | weight, scales, biases: code x scale + bias | see below |
| mxfp4, mxfp8 | weight, scales (E8M0 as bytes) | mxfp4, mxfp8_e4m3 |
| nvfp4 | weight, scales (E4M3 as bytes) | nvfp4 with a factor of 1 |

Affine weights whose biases are all -half of the codes' range times the scale are integers around zero and stay packed
as such. Others stay packed where GGUF has blocks with a float16 scale and minimum (4 and 5 bits) and float16 holds
theirs exactly. The rest is decoded to float32, in which MLX multiplies. Experts of a layer, one tensor in MLX, get the
names that Hugging Face gives them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bitplan.base.documents import show
from bitplan.files.schemes.integers import IntegerGroups, keep_packed, pieces, unpack_words
from bitplan.files.schemes.tensors import FLOATS, QuantizedFolder, SchemeWeight
from bitplan.formats import get_format
from bitplan.formats.format import Format
from bitplan.plan.structure.families import FAMILIES

if TYPE_CHECKING:
    from torch import Tensor

    from bitplan.formats import Encoded

SCALES = ".scales"
AFFINE = "affine"
# Modes of small floats: our format, bits of a code, numbers that share a scale.
FLOAT_MODES = {"mxfp4": ("mxfp4", 4, 32), "mxfp8": ("mxfp8_e4m3", 8, 32), "nvfp4": ("nvfp4", 4, 16)}
# GGUF's blocks with a float16 scale and a float16 minimum, by the bits of a code.
WITH_MINIMUM = {4: "q4_1_gguf", 5: "q5_1_gguf"}
EXPERTS = ".switch_mlp."
_EXPERTS = {family.experts.experts: family.experts for family in FAMILIES.values() if family.experts is not None}


@dataclass(frozen=True)
class Module:
    """A quantized layer in an MLX folder, or one expert of it: names of its tensors, and its bits, group and mode."""

    folder: QuantizedFolder
    owner: str
    name: str
    expert: int | None
    bits: int
    group: int
    mode: str

    def read(self, part: str) -> Tensor:
        name = f"{self.owner}.{part}"
        if self.expert is None:
            return self.folder.read(name)
        return self.folder.checkpoint.read_rows(name, self.expert, self.expert + 1)[0]


def list_weights(folder: QuantizedFolder) -> Iterator[SchemeWeight]:
    for name, entry in folder.checkpoint.tensors.items():
        if name.endswith(SCALES):
            owner = name.removesuffix(SCALES)
            for module in _modules(folder, owner, len(folder.part(name, (*FLOATS, "uint8"), of=owner).shape)):
                yield _affine(module) if module.mode == AFFINE else _small_floats(module)
        elif EXPERTS in name and name.endswith(".weight") and entry.dtype != "uint32":
            yield from _plain_experts(folder, name)


def _modules(folder: QuantizedFolder, owner: str, axes: int) -> Iterator[Module]:
    of_module = folder.settings.get(owner)
    settings: dict[str, Any] = {"mode": AFFINE, **(of_module if isinstance(of_module, dict) else folder.settings)}
    mode, bits, group = settings["mode"], settings.get("bits"), settings.get("group_size")
    fits = type(group) is int and 0 < group < 2**31
    if mode == AFFINE:
        fits = fits and type(bits) is int and bits in (2, 3, 4, 5, 6, 8)
    elif type(mode) is str and mode in FLOAT_MODES:
        fits = (bits, group) == FLOAT_MODES[mode][1:]
    else:
        folder.refuse(f"{owner!r} in MLX's mode {show(mode)}")
    if not fits:
        folder.refuse(f"{owner!r} in MLX's mode {mode} with {show(bits)} bits and groups of {show(group)}")
    assert type(bits) is int
    assert type(group) is int
    module = Module(folder, owner, f"{owner}.weight", None, bits, group, mode)
    if axes != 3:
        yield module
        return
    count = folder.part(f"{owner}.weight", ("uint32",), (None, None, None), of=owner).shape[0]
    for expert in range(count):
        yield replace(module, name=_expert_name(folder, f"{owner}.weight", expert), expert=expert)


def _expert_name(folder: QuantizedFolder, name: str, expert: int) -> str:
    """Hugging Face's name of an expert that MLX holds in a layer's tensor."""
    before, is_expert, layer = name.partition(EXPERTS)
    if not is_expert:
        folder.stop(name, "has three axes and is not a layer's experts (switch_mlp), so its weights have no names")
    local, _, kind = layer.partition(".")
    named = next((names for path, names in _EXPERTS.items() if f"{before}.experts".endswith(f".{path}")), None)
    role = local.removesuffix("_proj")
    if named is not None and role in ("gate", "up", "down"):
        local = getattr(named, role)
    return f"{before}.experts.{expert}.{local}.{kind}"


def _shape(module: Module, scale_types: tuple[str, ...]) -> tuple[int, int]:
    """Rows and columns of a quantized weight; raises where its scales and biases do not fit them."""
    folder, lead = module.folder, () if module.expert is None else (None,)
    words = folder.part(f"{module.owner}.weight", ("uint32",), (*lead, None, None), of=module.name)
    rows, cols = words.shape[-2], words.shape[-1] * 32 // module.bits
    if not rows or not cols or words.shape[-1] * 32 % module.bits or cols % module.group:
        folder.stop(
            module.name,
            f"{list(words.shape)} words are not rows of {module.bits} bits in groups of {module.group}",
        )
    scales = (*words.shape[:-1], cols // module.group)
    scale_part = folder.part(f"{module.owner}{SCALES}", scale_types, scales, of=module.name)
    if module.mode == AFFINE:
        folder.part(f"{module.owner}.biases", (scale_part.dtype,), scales, of=module.name)
    return rows, cols


def _affine(module: Module) -> SchemeWeight:
    shape = rows, cols = _shape(module, FLOATS)
    scale_type = module.folder.checkpoint.tensors[f"{module.owner}{SCALES}"].dtype
    scales, biases = module.read("scales"), module.read("biases")
    symmetric = bool((biases == scales * -(2 ** (module.bits - 1))).all())
    layout = IntegerGroups(rows, cols, module.bits, module.group, scale_type, symmetric)
    fmt: Format | None = None
    if symmetric:
        fmt, reason = layout.format()
    elif module.bits in WITH_MINIMUM and module.group % 32 == 0:
        if all(bool((part.half().to(part.dtype) == part).all()) for part in (scales, biases)):
            fmt, reason = get_format(WITH_MINIMUM[module.bits]), "the same codes, scales and minima"
            reason += f", each {module.group // 32} times" if module.group > 32 else ""
        else:
            reason = f"its scales or minima in {scale_type} are beyond the float16 of {WITH_MINIMUM[module.bits]}"
    else:
        reason = f"no format of bitplan has {module.bits} bits with a scale and a minimum for each group"
    fmt_name = fmt.name if fmt else None
    parts = tuple(f"{module.owner}.{part}" for part in ("weight", "scales", "biases"))
    read = functools.partial(_read_affine, module, layout, fmt)
    return SchemeWeight(
        module.name, shape, "float32", format=fmt_name, parts=parts, label=layout.label, reason=reason, read=read
    )


def _read_affine(module: Module, layout: IntegerGroups, fmt: Format | None) -> Tensor | Encoded:
    import torch

    codes = unpack_words(module.read("weight"), layout.bits, layout.cols)
    scales = module.read("scales")
    if fmt is not None and layout.symmetric:
        return keep_packed(layout, fmt, codes, scales)
    biases = module.read("biases")
    if fmt is not None:
        from bitplan.formats import Encoded
        from bitplan.formats.gguf.blocks import GgufBlocks
        from bitplan.formats.gguf.layouts import BlockParts

        assert isinstance(fmt, GgufBlocks)
        times = layout.group // fmt.layout.numbers
        d, low = (part.repeat_interleave(times, dim=1).flatten() for part in (scales, biases))
        blocks = BlockParts(codes.reshape(-1, fmt.layout.numbers), d, low)
        data = fmt.layout.pack(blocks).reshape(layout.rows, -1)
        return Encoded(fmt, (layout.rows, layout.cols), data)
    out = torch.empty(layout.rows, layout.cols)
    for rows in pieces(layout.rows, layout.cols):
        groups = codes[rows].float().reshape(-1, layout.groups, layout.group)
        numbers = groups * scales[rows].float().unsqueeze(-1) + biases[rows].float().unsqueeze(-1)
        out[rows] = numbers.flatten(1)
    return out


def _small_floats(module: Module) -> SchemeWeight:
    shape = _shape(module, ("uint8",))
    fmt = FLOAT_MODES[module.mode][0]
    reason = "the same codes and scales" + ("; its factor is 1" if fmt == "nvfp4" else "")
    parts = (f"{module.owner}.weight", f"{module.owner}{SCALES}")
    read = functools.partial(_read_small_floats, module, shape, fmt)
    return SchemeWeight(
        module.name, shape, "float32", format=fmt, parts=parts, label=module.mode, reason=reason, read=read
    )


def _read_small_floats(module: Module, shape: tuple[int, int], name: str) -> Encoded:
    import torch

    from bitplan.formats import Encoded

    fmt = get_format(name)
    parts = fmt.part_shapes(shape)
    data = module.read("weight").view(torch.uint8).view(parts["data"][0]).reshape(parts["data"][1])
    scales = module.read("scales").view(parts["scales"][0]).reshape(parts["scales"][1])
    return Encoded(fmt, shape, data, scales, torch.ones(()) if name == "nvfp4" else None)


def _plain_experts(folder: QuantizedFolder, name: str) -> Iterator[SchemeWeight]:
    """Yield each expert of a stack that is not quantized as a weight of its own."""
    entry = folder.part(name, FLOATS, (None, None, None), of=name)
    owner = name.removesuffix(".weight")
    for expert in range(entry.shape[0]):
        module = Module(folder, owner, _expert_name(folder, name, expert), expert, 0, 0, "")
        read = functools.partial(module.read, "weight")
        shape, kind = (entry.shape[1], entry.shape[2]), entry.dtype
        reason = "one of a layer's experts"
        yield SchemeWeight(module.name, shape, kind, parts=(name,), label=kind, reason=reason, read=read)
