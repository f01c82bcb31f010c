"""Which format each parameter of each block crosses the bus in.

`formats` may be
    None            every parameter in its own type: nothing is lost
    a name          that format for every weight of two or more axes; vectors (norms, biases) keep their own type
    a mapping       keys, first match wins: a parameter's full name, a block's name (its matrices, as above), or a
                    pattern of either with `*`; parameters that no key names keep their own type
    a Plan          by parameter name, exactly; a parameter of a block that the plan lacks is refused
Decisions only: no tensor is read. A key that names nothing is a spelling mistake and refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch

from bitplan.errors import did_you_mean
from bitplan.formats import Format, get_format
from bitplan.plan.names import listed
from bitplan.plan.plan import Plan
from bitplan.runtime.streaming.blocks.layout import ParameterSpec
from bitplan.runtime.streaming.errors import StreamError

Formats = Plan | Mapping[str, Format | str] | Format | str | None
# Block name -> (parameter's name within the block -> what it is).
BlockSpecs = Mapping[str, Mapping[str, ParameterSpec]]
BlockFormats = dict[str, dict[str, Format]]


def resolve_formats(formats: Formats, blocks: BlockSpecs, current: BlockFormats | None = None) -> BlockFormats:
    """Block -> parameter -> format. With `current`, what a mapping does not name stays as it is there."""
    base = current or {
        block: {name: own_format(spec, f"{block}.{name}") for name, spec in specs.items()}
        for block, specs in blocks.items()
    }
    if formats is None:
        return {block: dict(names) for block, names in base.items()}
    if isinstance(formats, Plan):
        return _from_plan(formats, blocks)
    if isinstance(formats, Format | str):
        formats = dict.fromkeys(blocks, formats)
    return _from_mapping(formats, blocks, base)


def own_format(spec: ParameterSpec, name: str) -> Format:
    """The plain cast to a parameter's own type."""
    text = str(spec.dtype).removeprefix("torch.")
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise StreamError(
            f"{name}: {text} cannot be streamed; float32, bfloat16, float16 and float64 parameters can: "
            "stream the model before it is packed, and give the packed formats as `formats`"
        )
    return get_format(text)


def _from_plan(plan: Plan, blocks: BlockSpecs) -> BlockFormats:
    names = {f"{block}.{name}" for block, specs in blocks.items() for name in specs}
    missing = sorted(names - set(plan))
    if missing:
        raise StreamError(f"the plan has no format for {listed(missing)}; resolve it from this model's names")
    for name in names:
        if plan.entries[name].part is not None:
            raise StreamError(f"{name}: the plan means a part ({plan.entries[name].part}), this is a whole parameter")
    return {
        block: {name: get_format(plan[f"{block}.{name}"].format) for name in specs} for block, specs in blocks.items()
    }


def _from_mapping(formats: Mapping[str, Format | str], blocks: BlockSpecs, base: BlockFormats) -> BlockFormats:
    chosen = {key: get_format(fmt) for key, fmt in formats.items()}
    used: set[str] = set()
    resolved: BlockFormats = {}
    for block, specs in blocks.items():
        resolved[block] = {}
        for name, spec in specs.items():
            key = _key_for(chosen, block, name, spec)
            used |= {key} if key else set()
            resolved[block][name] = chosen[key] if key else base[block][name]
    idle = [key for key in chosen if key not in used and not _names_something(key, blocks)]
    if idle:
        known = [*blocks, *(f"{block}.{name}" for block, specs in blocks.items() for name in specs)]
        raise StreamError(f"formats name {listed(idle)}, which no streamed block has{did_you_mean(idle[0], known)}")
    return resolved


def _key_for(keys: Iterable[str], block: str, name: str, spec: ParameterSpec) -> str | None:
    full, is_matrix = f"{block}.{name}", len(spec.shape) >= 2
    for key in keys:
        if fnmatchcase(block, key):
            if is_matrix:
                return key
        elif fnmatchcase(full, key) and (is_matrix or key == full):
            return key
    return None


def _names_something(key: str, blocks: BlockSpecs) -> bool:
    """Whether the key names a block or parameter at all, if only one that an earlier key decides."""
    return any(
        fnmatchcase(block, key) or any(fnmatchcase(f"{block}.{name}", key) for name in specs)
        for block, specs in blocks.items()
    )
